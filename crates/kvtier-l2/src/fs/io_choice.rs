//! Which engine moves the bytes: as told, or the faster one in this directory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_memory::uring::Tail;
use kvtier_memory::{Arena, ArenaKind, Extent};

use super::base::{Base, Temporary};
use super::beneath;
use super::io::{Engine, Move, Moved, Posix, Work};
use super::io_uring::Uring;
use super::options::IoEngine;
use crate::error::{ErrorKind, L2Error};
use crate::object::Buffer;

/// Files of the trial, and bytes of each.
const FILES: usize = 4;
const BYTES: u64 = 128 << 10;

/// How often both engines write and read all of them; the fastest turn counts.
const TURNS: usize = 2;

/// A trial that takes longer is given up.
const LONGEST: Duration = Duration::from_millis(20);

/// Of what the trial takes without io_uring, it may take so much: a hair's breadth is worth no other way.
const WORTH: f64 = 0.9;

/// An engine and why it is this one.
pub(super) struct Choice {
    pub engine: Box<dyn Engine>,
    pub why: String,
}

impl Choice {
    fn posix(why: String) -> Self {
        let engine = Box::new(Posix);
        Self { engine, why }
    }
}

/// # Errors
/// When io_uring is asked for by name and is not there.
pub(super) fn choose(told: IoEngine, base: &Base, direct: bool) -> Result<Choice, L2Error> {
    choose_of(told, Uring::new, |uring| measure(base, direct, uring))
}

fn choose_of(
    told: IoEngine,
    uring: impl FnOnce() -> std::io::Result<Uring>,
    measure: impl FnOnce(&Uring) -> Result<(Duration, Duration), String>,
) -> Result<Choice, L2Error> {
    if told == IoEngine::Posix {
        return Ok(Choice::posix("io_engine says so".into()));
    }
    let uring = match (uring(), told) {
        (Ok(uring), IoEngine::Uring) => {
            let engine = Box::new(uring);
            let why = "io_engine says so".into();
            return Ok(Choice { engine, why });
        }
        (Ok(uring), _) => uring,
        (Err(error), IoEngine::Uring) => {
            let message = format!(
                "io_engine is \"io_uring\", which this system does not give us: {error}; say \"posix\" or \"auto\""
            );
            return Err(L2Error::new(ErrorKind::Refused, message));
        }
        (Err(error), _) => return Ok(Choice::posix(format!("there is no io_uring: {error}"))),
    };
    Ok(match measure(&uring) {
        Ok((posix, ring)) => {
            let why = format!(
                "{FILES} files of {} KiB took {} us with io_uring and {} us without",
                BYTES >> 10,
                ring.as_micros(),
                posix.as_micros()
            );
            match ring.as_secs_f64() < WORTH * posix.as_secs_f64() {
                true => Choice {
                    engine: Box::new(uring),
                    why,
                },
                false => Choice::posix(why),
            }
        }
        Err(error) => Choice::posix(format!("the trial ended early: {error}")),
    })
}

/// What both engines take for the same files: plain system calls, io_uring. The files have no names by then.
fn measure(base: &Base, direct: bool, uring: &Uring) -> Result<(Duration, Duration), String> {
    let begun = Instant::now();
    let dir = base.dir();
    let mut files = Vec::new();
    for _ in 0..FILES {
        let made = base.create(&dir, direct);
        let Temporary { path, file } = made.map_err(|error| error.to_string())?;
        let removed = beneath::unlink(&dir, &path);
        removed.map_err(|error| error.to_string())?;
        files.push(file);
    }
    let arena = Arena::create(ArenaKind::Anonymous, FILES as u64 * BYTES);
    let arena = Arc::new(arena.map_err(|error| error.to_string())?);
    let trial = |engine: &dyn Engine, size| {
        let start = Instant::now();
        let mut turn = Turn {
            files: files.iter().map(OwnedFd::try_clone).collect(),
            arena: &arena,
            size,
            failed: None,
        };
        engine.run(&mut turn);
        let taken = start.elapsed();
        match turn.failed {
            None if begun.elapsed() < LONGEST => Ok(taken),
            None => Err(format!("it takes more than {} ms", LONGEST.as_millis())),
            Some(error) => Err(error),
        }
    };
    // The first writes make room on the disk, which the others find.
    trial(&Posix, None)?;
    let mut best = [Duration::MAX; 2];
    for _ in 0..TURNS {
        let engines: [&dyn Engine; 2] = [&Posix, uring];
        for (best, engine) in best.iter_mut().zip(engines) {
            *best = trial(engine, None)?
                .saturating_add(trial(engine, Some(BYTES))?)
                .min(*best);
        }
    }
    Ok((best[0], best[1]))
}

/// All files once, one way.
struct Turn<'a> {
    files: Vec<std::io::Result<OwnedFd>>,
    arena: &'a Arc<Arena>,
    size: Option<u64>,
    failed: Option<String>,
}

impl Work for Turn<'_> {
    fn next(&mut self) -> Option<Move> {
        let file = self.files.pop()?;
        let number = self.files.len();
        match file {
            Ok(file) => Some(Move {
                number,
                file,
                buffer: Buffer::new(
                    Arc::clone(self.arena),
                    Extent::new(number as u64 * BYTES, BYTES),
                    Arc::new(()),
                ),
                body: BYTES,
                tail: Tail::default(),
                size: self.size,
            }),
            Err(error) => {
                self.failed = Some(error.to_string());
                None
            }
        }
    }

    fn done(&mut self, _: Move, moved: Moved) {
        if let Err(error) = moved {
            self.failed = Some(error.to_string());
        }
    }

    fn lost(&mut self, _: usize) {
        self.failed = Some("io_uring failed".into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uring() -> std::io::Result<Uring> {
        Uring::new().inspect_err(|error| println!("skipped: no io_uring here: {error}"))
    }

    fn chosen(posix: u64, ring: u64) -> Choice {
        let times = (Duration::from_micros(posix), Duration::from_micros(ring));
        choose_of(IoEngine::Auto, uring, |_| Ok(times)).unwrap()
    }

    #[test]
    fn the_faster_one_is_taken_if_it_is_worth_it() {
        if uring().is_err() {
            return;
        }
        let choice = chosen(1000, 500);
        assert_eq!(choice.engine.name(), "io_uring");
        assert!(
            choice
                .why
                .contains("500 us with io_uring and 1000 us without")
        );
        for (posix, ring) in [(1000, 950), (1000, 1000), (500, 1000)] {
            assert_eq!(chosen(posix, ring).engine.name(), "posix");
        }
    }

    #[test]
    fn a_trial_that_fails_is_told_and_costs_nothing() {
        if uring().is_err() {
            return;
        }
        let choice = choose_of(IoEngine::Auto, uring, |_| Err("a full disk".into())).unwrap();
        assert_eq!(choice.engine.name(), "posix");
        assert!(choice.why.contains("a full disk"));
    }

    #[test]
    fn a_system_without_it_is_told() {
        for code in [rustix::io::Errno::NOSYS, rustix::io::Errno::PERM] {
            let none = || Err(std::io::Error::from(code));
            let choice = choose_of(IoEngine::Auto, none, |_| unreachable!()).unwrap();
            assert_eq!(choice.engine.name(), "posix");
            assert!(choice.why.contains("no io_uring"), "{}", choice.why);
            let error = choose_of(IoEngine::Uring, none, |_| unreachable!())
                .err()
                .unwrap();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert!(error.to_string().contains("io_engine"), "{error}");
        }
    }

    #[test]
    fn a_trial_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let base = Base::open(dir.path().to_owned(), "").unwrap();
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let before = names();
        for direct in [false, true] {
            let told = choose(IoEngine::Auto, &base, direct).unwrap();
            assert!(!told.why.is_empty());
            assert_eq!(names(), before);
        }
    }
}
