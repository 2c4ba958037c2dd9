//! How fast each executor is on this GPU, and whether it is right: tried out before the GPU is used.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_memory::{Arena, ArenaKind, CopyLoop};

use super::super::device_copy::{DeviceCopies, DeviceCopy, PinnedPieces};
use super::super::driver::{Context, DeviceBuffer, RegisteredHost, Stream};
use super::super::error::CudaError;
use super::super::error::code::OUT_OF_MEMORY;
use super::super::kernel::Unit;
use super::executor::{Executor, HostMemory, Lane, SLOTS, Tools};
use crate::plan::Direction;

/// Lengths of runs that are tried, in bytes.
pub const TRIED_RUNS: [u64; 8] = [
    256,
    1 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    256 << 10,
];
/// Bytes of a piece in a trial: enough for a full link, but no more than this many runs, for the slowest executor takes a
/// microsecond for each.
const TRIAL_BYTES: u64 = 2 << 20;
const TRIAL_RUNS: u64 = 512;
/// Memory of a trial: a piece for each slot.
const BENCH_BYTES: u64 = SLOTS as u64 * TRIAL_BYTES;
/// Trials of each; the best counts.
const ROUNDS: u32 = 3;
/// What the side that is written has in it before.
const UNTOUCHED: u8 = 0xa5;
/// How much slower an executor may be than the fastest and be taken because it disturbs less. Without NVIDIA's MPS a
/// kernel of ours and the model's take turns, so what keeps no multiprocessor busy is worth some speed.
const AS_FAST: f64 = 0.9;
/// The obstacle that may go by itself.
const NO_ROOM: &str = "the GPU has no memory for its buffers";

/// Bytes a second that each executor reached, by direction, executor and [`TRIED_RUNS`]; `None` where it cannot be
/// used.
pub type Rates = [[[Option<f64>; TRIED_RUNS.len()]; Executor::ALL.len()]; 2];

/// What is known of a GPU's executors.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// How fast they are.
    pub rates: Rates,
    /// Why some cannot be used: name and reason.
    pub obstacles: Vec<(Executor, String)>,
    /// What memory that is registered is to this GPU.
    pub(super) registered: HostMemory,
}

impl Profile {
    /// The executor for a piece whose runs have `mean` bytes on average and are in such memory of the host, with room
    /// to stage it or without.
    pub(super) fn choose(
        &self,
        direction: Direction,
        mean: u64,
        host: HostMemory,
        room: bool,
    ) -> Executor {
        // The longest one tried that is no longer.
        let tried = TRIED_RUNS.partition_point(|run| *run <= mean);
        let tried = tried.saturating_sub(1);
        let rate = |executor: &Executor| {
            let usable = executor.with(host) == *executor;
            let usable = usable && (room || *executor != Executor::Staged);
            self.rates[direction as usize][*executor as usize][tried].filter(|_| usable)
        };
        let best = Executor::ALL.iter().filter_map(rate).fold(0.0, f64::max);
        let fast = |executor: &Executor| rate(executor).is_some_and(|rate| rate >= AS_FAST * best);
        Executor::ALL
            .into_iter()
            .find(fast)
            .unwrap_or(Executor::Plain)
    }

    /// Why an executor cannot be used, if it cannot.
    pub(super) fn obstacle(&self, executor: Executor) -> Option<&(Executor, String)> {
        self.obstacles.iter().find(|(other, _)| *other == executor)
    }

    /// Whether [`Executor::Staged`] was not tried, for the GPU had no memory for that.
    pub(super) fn lacks_room(&self) -> bool {
        let staged = self.obstacle(Executor::Staged);
        staged.is_some_and(|(_, why)| why == NO_ROOM)
    }
}

/// Tries every executor both ways, on idle lanes for stores and retrieves. An executor that cannot be used, fails, or
/// moves wrong bytes is left out.
///
/// # Errors
/// What the driver says where it is about more than an executor.
pub(super) fn try_out(tools: &Tools, mut lanes: [&mut Lane; 2]) -> Result<Profile, CudaError> {
    let bench = Bench::new(&tools.context)?;
    let mut profile = Profile {
        registered: bench.memory,
        ..Profile::default()
    };
    for executor in Executor::ALL {
        if let Err(error) = bench.try_one(tools, &mut lanes, executor, &mut profile) {
            return Err(bench.lost(error));
        }
    }
    Ok(profile)
}

/// Tries [`Executor::Staged`] where the GPU [had no memory for that](Profile::lacks_room); nothing when it has none yet,
/// or when the driver refuses what a trial needs: the GPU serves without.
///
/// # Errors
/// What the driver says where the GPU is of no use any more: when it ended the context, or when nobody knows what still
/// moves on the lanes.
pub(super) fn try_staged(
    tools: &Tools,
    mut lanes: [&mut Lane; 2],
    known: &Profile,
) -> Result<Option<Profile>, CudaError> {
    // Most often there is no more than before, and that is found out by this alone.
    if !lanes[0].has_room(0, Instant::now(), Duration::ZERO)? {
        return Ok(None);
    }
    let bench = match Bench::new(&tools.context) {
        Ok(bench) => bench,
        Err(error) if error.ends_context() => return Err(error),
        Err(_) => {
            lanes[0].drop_staging();
            return Ok(None);
        }
    };
    let mut profile = known.clone();
    let others = |(executor, _): &(Executor, String)| *executor != Executor::Staged;
    profile.obstacles.retain(others);
    match bench.try_one(tools, &mut lanes, Executor::Staged, &mut profile) {
        Ok(()) => Ok(Some(profile).filter(|profile| !profile.lacks_room())),
        Err(error) if error.ends_context() || bench.settle(&lanes).is_err() => {
            Err(bench.lost(error))
        }
        Err(error) => {
            tracing::warn!(
                gpu = tools.context.device().ordinal(),
                %error,
                "whether copies can be staged could not be tried; it is tried again"
            );
            lanes.into_iter().for_each(Lane::drop_staging);
            Ok(None)
        }
    }
}

/// Memory on both sides for trials, the host's as the arena's is: the system's, and registered.
struct Bench {
    stream: Stream,
    pages: DeviceBuffer,
    // Before the memory, which must stay mapped while it is registered.
    registered: Result<RegisteredHost, CudaError>,
    host: Arena,
    /// What the host's memory is to the GPU.
    memory: HostMemory,
    /// Bytes that tell their position.
    pattern: Vec<u8>,
}

/// Pieces that are moved together, each in a slot of its own.
struct Load {
    what: String,
    pieces: Vec<DeviceCopies>,
    /// Bytes from the start of each side that they are within.
    reach: usize,
}

impl Bench {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let host = Arena::create(ArenaKind::Anonymous, BENCH_BYTES);
        let host = host.map_err(|error| CudaError::Call {
            function: "the memory of a trial",
            code: -1,
            name: error.to_string(),
        })?;
        // SAFETY: it is given up before the memory is, and nobody else has the memory.
        let registered = unsafe { context.register_host(host.base(), BENCH_BYTES as usize) };
        let memory = match &registered {
            Ok(_) => HostMemory::of_registered(context, host.base()),
            Err(error) if error.ends_context() => return Err(error.clone()),
            Err(_) => HostMemory::Pageable,
        };
        Ok(Self {
            stream: Stream::new(context, 0)?,
            pages: context.allocate(BENCH_BYTES)?,
            registered,
            host,
            memory,
            pattern: pattern(),
        })
    }

    /// Why the host's memory is nothing for an executor, if it is not.
    fn obstacle(&self, executor: Executor) -> Option<String> {
        if executor.with(self.memory) == executor {
            return None;
        }
        Some(match &self.registered {
            Ok(_) => "the GPU sees registered memory elsewhere than the host".to_owned(),
            Err(error) => format!("memory of the host cannot be registered: {error}"),
        })
    }

    /// Waits for what a trial that failed has begun.
    fn settle(&self, lanes: &[&mut Lane; 2]) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        lanes.iter().try_for_each(|lane| lane.finish())
    }

    /// Is not given back after this error, if something may still use it.
    fn lost(self, error: CudaError) -> CudaError {
        if !error.ends_context() {
            // Nobody knows whether anything still moves.
            std::mem::forget(self);
        }
        error
    }

    /// Tries one executor, and enters what comes of it. After an error, nobody knows whether anything still moves.
    fn try_one(
        &self,
        tools: &Tools,
        lanes: &mut [&mut Lane; 2],
        executor: Executor,
        profile: &mut Profile,
    ) -> Result<(), CudaError> {
        let obstacle = tools.obstacle(executor).or_else(|| self.obstacle(executor));
        let tried = match obstacle {
            Some(obstacle) => Ok(Some(obstacle)),
            None => self.executor(lanes, executor, &mut profile.rates),
        };
        if let Some(obstacle) = tried? {
            for rates in &mut profile.rates {
                rates[executor as usize] = Default::default();
            }
            profile.obstacles.push((executor, obstacle));
        }
        Ok(())
    }

    /// Tries one executor; gives what is wrong with it.
    fn executor(
        &self,
        lanes: &mut [&mut Lane; 2],
        executor: Executor,
        rates: &mut Rates,
    ) -> Result<Option<String>, CudaError> {
        for direction in [Direction::Store, Direction::Retrieve] {
            let lane = &mut *lanes[direction as usize];
            let wrong = self.one_way(lane, direction, executor, rates)?;
            // Whoever is not chosen needs none, and the other way needs as much.
            lane.drop_staging();
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        Ok(None)
    }

    fn one_way(
        &self,
        lane: &mut Lane,
        direction: Direction,
        executor: Executor,
        rates: &mut Rates,
    ) -> Result<Option<String>, CudaError> {
        let mut slots = SLOTS;
        if executor == Executor::Staged {
            // Engines register when they have taken their memory, so there may be room for few.
            slots = 0;
            while slots < SLOTS && lane.has_room(slots, Instant::now(), Duration::ZERO)? {
                slots += 1;
            }
            if slots == 0 {
                return Ok(Some(NO_ROOM.to_owned()));
            }
        }
        for (tried, run) in TRIED_RUNS.into_iter().enumerate() {
            let load = self.runs_of(run, slots as u64);
            match self.load(lane, direction, executor, &load, ROUNDS)? {
                Ok(rate) => rates[direction as usize][executor as usize][tried] = Some(rate),
                Err(wrong) => return Ok(Some(wrong)),
            }
        }
        let tried = self.load(lane, direction, executor, &self.crooked(), 1)?;
        Ok(tried.err())
    }

    /// Moves a load some times over, and looks at every byte of the side that is written; gives the bytes a second of
    /// the fastest time, or what is wrong. Its pieces are under way at once, as in earnest: what starting one takes
    /// counts only as far as it holds up the one before it.
    fn load(
        &self,
        lane: &mut Lane,
        direction: Direction,
        executor: Executor,
        load: &Load,
        rounds: u32,
    ) -> Result<Result<f64, String>, CudaError> {
        self.fill(direction, load.reach)?;
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let began = Instant::now();
            let put = load.pieces.iter().enumerate().map(|(slot, copies)| {
                // SAFETY: the copies are inside the two memories, which live until the lane has finished; the context
                // is current, and every slot is done.
                unsafe { lane.put(slot, executor, copies, PinnedPieces::WHOLE) }
            });
            let put: Result<Vec<Executor>, CudaError> = put.collect();
            lane.finish()?;
            best = best.min(began.elapsed().as_secs_f64());
            match put {
                Ok(used) => {
                    if let Some(other) = used.iter().find(|used| **used != executor) {
                        return Ok(Err(format!("it gave way to {}", other.name())));
                    }
                }
                Err(error) if error.ends_context() => return Err(error),
                Err(error)
                    if executor == Executor::Staged && error.code() == Some(OUT_OF_MEMORY) =>
                {
                    return Ok(Err(NO_ROOM.to_owned()));
                }
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
        if let Some(at) = self.first_wrong(direction, load)? {
            return Ok(Err(format!(
                "it moved wrong bytes: {direction:?}, {}, byte {at}",
                load.what
            )));
        }
        let bytes: u64 = load
            .pieces
            .iter()
            .map(|piece| piece.run_lengths().bytes)
            .sum();
        Ok(Ok(bytes as f64 / best))
    }

    /// Runs that adjoin on neither side with the one before: in each piece, the last one first on one side.
    fn runs_of(&self, run: u64, slots: u64) -> Load {
        let runs = (TRIAL_BYTES / run).min(TRIAL_RUNS);
        let piece = |slot: u64| {
            let mut copies = DeviceCopies::default();
            let start = slot * runs * run;
            for number in 0..runs {
                let back = runs - 1 - number;
                copies.push(self.copy(start + back * run, start + number * run, run));
            }
            copies
        };
        Load {
            what: format!("runs of {run} bytes"),
            pieces: (0..slots).map(piece).collect(),
            reach: (slots * runs * run) as usize,
        }
    }

    /// Copies with loops in another order on each side, and runs longer than a tile, each of them with addresses and
    /// lengths that are multiples of 16, 8, 4, 2 and 1: all that the kernel has code for.
    fn crooked(&self) -> Load {
        let mut copies = DeviceCopies::default();
        let mut at = 0;
        for unit in Unit::ALL.map(Unit::bytes) {
            for (units, counts) in [(3, [4, 5, 24]), (40, [2, 3, 4]), (1281, [1; 3])] {
                // Odd as a number of units, so that nothing larger divides it.
                let run = units * unit;
                let [outer, middle, inner] = counts;
                let step = |count, segment_stride, arena_stride| CopyLoop {
                    count,
                    segment_stride,
                    arena_stride,
                };
                let mut copy = self.copy(at + 32 + unit, at, run);
                copy.loops = [
                    step(outer, run * middle * inner, run * middle * inner),
                    step(middle, run, run * inner),
                    step(inner, run * middle, run),
                ];
                at = (at + copy.bytes() + 64).next_multiple_of(64);
                copies.push(copy);
            }
        }
        Load {
            what: "runs of all alignments".to_owned(),
            pieces: vec![copies],
            reach: at as usize,
        }
    }

    /// A run, from the starts of both sides.
    fn copy(&self, pages: u64, host: u64, bytes: u64) -> DeviceCopy {
        DeviceCopy {
            engine: self.pages.base().0 + pages,
            host: self.host.base().as_ptr() as u64 + host,
            inner_bytes: bytes,
            loops: [CopyLoop::ONCE; 3],
        }
    }

    /// Puts the pattern into the side that is read, and something else into the other.
    fn fill(&self, direction: Direction, reach: usize) -> Result<(), CudaError> {
        let (pages, start) = (self.pages.base(), self.host.base().as_ptr());
        // SAFETY: the memory is ours, has these bytes, and nothing copies now.
        let host = unsafe { std::slice::from_raw_parts_mut(start, reach) };
        host.copy_from_slice(&self.pattern[..reach]);
        // SAFETY: both sides have these bytes and live until the stream has ended, here.
        unsafe {
            match direction {
                Direction::Store => self.stream.copy_to_device(pages, start, reach),
                Direction::Retrieve => self.stream.fill(pages, UNTOUCHED, reach),
            }
        }?;
        self.stream.synchronize()?;
        if direction == Direction::Store {
            host.fill(UNTOUCHED);
        }
        Ok(())
    }

    /// The first byte of the side that was written that is not as it should be, if there is one.
    fn first_wrong(&self, direction: Direction, load: &Load) -> Result<Option<usize>, CudaError> {
        let start = self.host.base().as_ptr();
        if direction == Direction::Retrieve {
            // SAFETY: as in `fill`.
            unsafe {
                self.stream
                    .copy_to_host(start, self.pages.base(), load.reach)
            }?;
            self.stream.synchronize()?;
        }
        // SAFETY: as in `fill`.
        let written = unsafe { std::slice::from_raw_parts(start.cast_const(), load.reach) };
        let mut expected = vec![UNTOUCHED; load.reach];
        for piece in &load.pieces {
            let visited: Result<(), Infallible> = piece.visit_runs(PinnedPieces::WHOLE, |run| {
                let engine = (run.engine - self.pages.base().0) as usize;
                let host = (run.host - start as u64) as usize;
                let (from, to) = match direction {
                    Direction::Store => (engine, host),
                    Direction::Retrieve => (host, engine),
                };
                let bytes = run.bytes as usize;
                expected[to..][..bytes].copy_from_slice(&self.pattern[from..][..bytes]);
                Ok(())
            });
            let Ok(()) = visited;
        }
        // All at once first: most are right.
        Ok(match written == expected {
            true => None,
            false => written
                .iter()
                .zip(&expected)
                .position(|(is, should)| is != should),
        })
    }
}

fn pattern() -> Vec<u8> {
    let mut bytes = vec![0; BENCH_BYTES as usize];
    let mut number = 0u64;
    for word in bytes.chunks_exact_mut(8) {
        number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (number ^ (number >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(rates: &[(Executor, f64)]) -> Profile {
        let mut profile = Profile::default();
        for (executor, rate) in rates {
            profile.rates[Direction::Store as usize][*executor as usize][2] = Some(*rate);
        }
        profile
    }

    #[test]
    fn the_fastest_is_chosen_and_copy_engines_when_they_are_as_fast() {
        let choose =
            |rates: &[_], host| profile(rates).choose(Direction::Store, 4 << 10, host, true);
        let all = [
            (Executor::Batch, 20.0),
            (Executor::Kernel, 50.0),
            (Executor::Staged, 44.0),
            (Executor::Plain, 1.0),
        ];
        let [pageable, pinned, mapped] =
            [HostMemory::Pageable, HostMemory::Pinned, HostMemory::Mapped];
        assert_eq!(choose(&all, mapped), Executor::Kernel);
        assert_eq!(choose(&all, pinned), Executor::Staged);
        assert_eq!(choose(&all, pageable), Executor::Staged);
        let near = [(Executor::Batch, 48.0), (Executor::Kernel, 50.0)];
        assert_eq!(choose(&near, mapped), Executor::Batch);
        assert_eq!(choose(&near[1..], mapped), Executor::Kernel);
        assert_eq!(choose(&near, pinned), Executor::Batch);
        assert_eq!(choose(&near, pageable), Executor::Plain);
        assert_eq!(choose(&[], mapped), Executor::Plain);
        let without_room = |host| profile(&all).choose(Direction::Store, 4 << 10, host, false);
        assert_eq!(without_room(mapped), Executor::Kernel);
        assert_eq!(without_room(pinned), Executor::Batch);
        assert_eq!(without_room(pageable), Executor::Plain);
    }

    #[test]
    fn a_length_is_taken_for_the_longest_that_was_tried_below_it() {
        let mut profile = Profile::default();
        for (tried, executor) in [
            (0, Executor::Kernel),
            (TRIED_RUNS.len() - 1, Executor::Batch),
        ] {
            profile.rates[Direction::Retrieve as usize][executor as usize][tried] = Some(1.0);
        }
        let choose = |mean| profile.choose(Direction::Retrieve, mean, HostMemory::Mapped, true);
        assert_eq!(choose(1), Executor::Kernel);
        assert_eq!(choose(256), Executor::Kernel);
        assert_eq!(choose(1023), Executor::Kernel);
        assert_eq!(choose(256 << 10), Executor::Batch);
        assert_eq!(choose(u64::MAX), Executor::Batch);
    }
}
