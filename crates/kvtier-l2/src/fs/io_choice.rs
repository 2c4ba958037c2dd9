//! Which engine moves the bytes: as told, or the faster one in this directory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_memory::uring::Tail;
use kvtier_memory::{Arena, ArenaKind, Extent};
use rustix::fs::OFlags;

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
    let measure = |uring: &Uring| measure(base, direct, uring, LONGEST);
    choose_of(told, Uring::new, measure)
}

/// What a trial took: plain system calls, io_uring; or why there is no saying.
type Measured = Result<(Duration, Duration), String>;

fn choose_of<U: Engine>(
    told: IoEngine,
    uring: impl FnOnce() -> std::io::Result<U>,
    measure: impl FnOnce(&U) -> Measured,
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
    let (takes_uring, why) = decide(measure(&uring));
    Ok(match takes_uring {
        true => Choice {
            engine: Box::new(uring),
            why,
        },
        false => Choice::posix(why),
    })
}

/// Whether it is io_uring, and why.
fn decide(measured: Measured) -> (bool, String) {
    match measured {
        Ok((posix, ring)) => {
            let why = format!(
                "{FILES} files of {} KiB took {} us with io_uring and {} us without",
                BYTES >> 10,
                ring.as_micros(),
                posix.as_micros()
            );
            (ring < posix.mul_f64(WORTH), why)
        }
        Err(error) => (false, format!("the trial ended early: {error}")),
    }
}

/// What both engines take for the same files, until their checksums are known. The files have no names by then.
fn measure(base: &Base, direct: bool, uring: &dyn Engine, longest: Duration) -> Measured {
    let begun = Instant::now();
    let dir = base.dir();
    let mut files = Vec::new();
    for _ in 0..FILES {
        // What is written is read by the same descriptor.
        let made = base.create(&dir, base.temporary(), OFlags::RDWR, direct);
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
            sums: Vec::new(),
            failed: None,
        };
        engine.run(&mut turn);
        let taken = start.elapsed();
        match turn.failed {
            None if begun.elapsed() < longest => Ok(taken),
            None => Err(format!("it takes more than {} ms", longest.as_millis())),
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
    /// Of what was read. A load needs it, and an engine that does not give it has only postponed the work.
    sums: Vec<u128>,
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

    fn done(&mut self, one: Move, moved: Moved) {
        let sum = match moved {
            Ok((_, Some(sum))) => Ok(sum),
            Ok((_, None)) if one.size.is_none() => return,
            Ok((_, None)) => one.buffer.checksum().map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match sum {
            Ok(sum) => self.sums.push(sum),
            Err(error) => self.failed = Some(error),
        }
    }

    fn lost(&mut self, _: usize) {
        self.failed = Some("io_uring failed".into());
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    /// Has another name than plain system calls.
    struct Named;

    impl Engine for Named {
        fn name(&self) -> &'static str {
            "io_uring"
        }
    }

    fn uring() -> Option<Uring> {
        Uring::new()
            .inspect_err(|error| println!("skipped: no io_uring here: {error}"))
            .ok()
    }

    #[test]
    fn the_faster_one_is_taken_if_it_is_worth_it() {
        let times = |posix, ring| {
            let micros = Duration::from_micros;
            Ok((micros(posix), micros(ring)))
        };
        let took = |posix, ring| {
            format!("4 files of 128 KiB took {ring} us with io_uring and {posix} us without")
        };
        let early = "the trial ended early: a full disk".to_owned();
        for (measured, name, why) in [
            (times(1000, 500), "io_uring", took(1000, 500)),
            (times(1000, 899), "io_uring", took(1000, 899)),
            (times(1000, 900), "posix", took(1000, 900)),
            (times(1000, 1000), "posix", took(1000, 1000)),
            (times(500, 1000), "posix", took(500, 1000)),
            (times(0, 0), "posix", took(0, 0)),
            (Err("a full disk".into()), "posix", early),
        ] {
            let told = decide(measured.clone());
            assert_eq!(told, (name == "io_uring", why.clone()));
            let choice = choose_of(IoEngine::Auto, || Ok(Named), |_| measured).unwrap();
            assert_eq!((choice.engine.name(), choice.why), (name, why));
        }
    }

    #[test]
    fn what_is_asked_for_by_name_is_not_tried() {
        for (told, name) in [(IoEngine::Uring, "io_uring"), (IoEngine::Posix, "posix")] {
            let choice = choose_of(told, || Ok(Named), |_| unreachable!()).unwrap();
            assert_eq!(choice.engine.name(), name);
            assert!(choice.why.contains("io_engine"), "{}", choice.why);
        }
    }

    #[test]
    fn a_system_without_it_is_told() {
        for code in [Errno::NOSYS, Errno::PERM] {
            let none = || Err::<Named, _>(std::io::Error::from(code));
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
    fn a_trial_comes_to_its_end_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let base = Base::open(dir.path().to_owned(), "").unwrap();
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let before = names();
        let mut others: Vec<Box<dyn Engine>> = vec![Box::new(Named)];
        if let Some(uring) = uring() {
            others.push(Box::new(uring));
        }
        for other in &others {
            for direct in [false, true] {
                let (posix, ring) = measure(&base, direct, &**other, Duration::MAX).unwrap();
                assert!(!posix.is_zero() && !ring.is_zero());
                assert_eq!(names(), before);
                let late = measure(&base, direct, &**other, Duration::ZERO);
                assert!(late.unwrap_err().contains("more than 0 ms"));
                assert_eq!(names(), before);
            }
        }
    }

    /// Both engines have done the same when a turn ends.
    #[test]
    fn a_turn_ends_with_the_checksums() {
        let bytes = FILES as u64 * BYTES;
        let arena = Arc::new(Arena::create(ArenaKind::Anonymous, bytes).unwrap());
        for number in 0..FILES as u64 {
            let place = Extent::new(number * BYTES, BYTES);
            arena.write(place, 0, &[number as u8 + 1; 100]).unwrap();
        }
        let files = [(); FILES].map(|()| tempfile::tempfile().unwrap());
        let sums = |engine: &dyn Engine, size| {
            let cloned = files.iter().map(|file| file.try_clone().map(Into::into));
            let mut turn = Turn {
                files: cloned.collect(),
                arena: &arena,
                size,
                sums: Vec::new(),
                failed: None,
            };
            engine.run(&mut turn);
            assert_eq!(turn.failed, None);
            turn.sums.sort_unstable();
            turn.sums
        };
        assert!(sums(&Posix, None).is_empty());
        let expected = sums(&Posix, Some(BYTES));
        assert_eq!(expected.len(), FILES);
        if let Some(uring) = uring() {
            assert!(sums(&uring, None).is_empty());
            assert_eq!(sums(&uring, Some(BYTES)), expected);
        }
    }
}
