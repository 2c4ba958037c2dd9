//! Trial of a GPU's executors: their rates, and whether they copy correctly, before the GPU is used.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind};
use kvtier_memory::{Arena, ArenaKind, CopyLoop};

use super::super::device_copy::{DeviceCopies, DeviceCopy, PinnedPieces};
use super::super::driver::{Context, DeviceBuffer, RegisteredHost, Stream};
use super::super::error::CudaError;
use super::super::error::code::OUT_OF_MEMORY;
use super::super::kernel::Unit;
use super::executor::{CopyLane, Executor, HostMemory, SLOTS, Tools};
use crate::plan::Direction;

/// Run lengths of the trial, in bytes.
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
/// Limits of a piece in the trial: enough bytes to fill the link, but few runs, because the slowest executor takes a
/// microsecond per run.
const TRIAL_BYTES: u64 = 2 << 20;
const TRIAL_RUNS: u64 = 512;
/// Memory of the trial: one piece per slot.
const BENCH_BYTES: u64 = SLOTS as u64 * TRIAL_BYTES;
/// Rounds per measurement; the best counts. Rates of debug builds mean nothing.
const ROUNDS: u32 = if cfg!(debug_assertions) { 1 } else { 3 };
/// Content of the target side before a copy.
const FILLER: u8 = 0xa5;
/// Minimum rate, relative to the fastest executor, of one that is preferred because it interferes less. Without NVIDIA's
/// MPS our kernel and the model's take turns, so not using multiprocessors is worth some speed.
const MIN_RELATIVE_RATE: f64 = 0.9;
/// The reason for an unavailable executor that may disappear later.
const NO_STAGING_MEMORY: &str = "the GPU has no memory for its buffers";

/// Bytes per second by direction, executor and [`TRIED_RUNS`]; `None` if the executor is unavailable.
pub type Rates = [[[Option<f64>; TRIED_RUNS.len()]; Executor::ALL.len()]; 2];

/// Result of the trial.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Measured rates.
    pub rates: Rates,
    /// Unavailable executors and the reasons.
    pub obstacles: Vec<(Executor, String)>,
    /// Level of registered host memory on this GPU.
    pub(super) registered: HostMemory,
}

impl Profile {
    /// The executor for a piece with `mean` bytes per run in host memory of level `host`. `can_stage`: whether it has a
    /// staging buffer.
    pub(super) fn choose(
        &self,
        direction: Direction,
        mean: u64,
        host: HostMemory,
        can_stage: bool,
    ) -> Executor {
        // The longest measured run that is not longer.
        let tried = TRIED_RUNS.partition_point(|run| *run <= mean);
        let tried = tried.saturating_sub(1);
        let rate = |executor: &Executor| {
            let usable = executor.with(host) == *executor;
            let usable = usable && (can_stage || *executor != Executor::Staged);
            self.rates[direction as usize][*executor as usize][tried].filter(|_| usable)
        };
        let best = Executor::ALL.iter().filter_map(rate).fold(0.0, f64::max);
        let fast = |executor: &Executor| {
            rate(executor).is_some_and(|rate| rate >= MIN_RELATIVE_RATE * best)
        };
        Executor::ALL
            .into_iter()
            .find(fast)
            .unwrap_or(Executor::Plain)
    }

    /// Why an executor is unavailable, if it is.
    pub(super) fn obstacle(&self, executor: Executor) -> Option<&(Executor, String)> {
        self.obstacles.iter().find(|(other, _)| *other == executor)
    }

    /// Whether [`Executor::Staged`] was not measured, because the GPU had no memory for it.
    pub(super) fn lacks_staging_memory(&self) -> bool {
        let staged = self.obstacle(Executor::Staged);
        staged.is_some_and(|(_, why)| why == NO_STAGING_MEMORY)
    }
}

/// Measures every executor in both directions, on idle lanes. Executors that are unavailable, fail, or copy wrong bytes
/// get no rate.
///
/// # Errors
/// Driver errors that concern more than one executor.
pub(super) fn try_out(tools: &Tools, mut lanes: [&mut CopyLane; 2]) -> Result<Profile, CudaError> {
    let trial = TrialMemory::new(&tools.context)?;
    let mut profile = Profile {
        registered: trial.memory,
        ..Profile::default()
    };
    for executor in Executor::ALL {
        if let Err(error) = trial.try_executor(tools, &mut lanes, executor, &mut profile) {
            return Err(trial.keep_while_in_use(error));
        }
    }
    Ok(profile)
}

/// Measures [`Executor::Staged`] after the GPU [had no memory for it](Profile::lacks_staging_memory). `None` if there is
/// still none, or the driver refuses the memory of the trial: the GPU serves without.
///
/// # Errors
/// Errors after which the GPU is unusable: the context is lost, or the state of the lanes is unknown.
pub(super) fn try_staged(
    tools: &Tools,
    mut lanes: [&mut CopyLane; 2],
    known: &Profile,
) -> Result<Option<Profile>, CudaError> {
    // Usually there is still no memory, which this alone detects.
    if !lanes[0].has_staging_buffer(0, Instant::now(), Duration::ZERO)? {
        return Ok(None);
    }
    let trial = match TrialMemory::new(&tools.context) {
        Ok(trial) => trial,
        Err(error) if error.ends_context() => return Err(error),
        Err(_) => {
            lanes[0].drop_staging();
            return Ok(None);
        }
    };
    let mut profile = known.clone();
    let others = |(executor, _): &(Executor, String)| *executor != Executor::Staged;
    profile.obstacles.retain(others);
    match trial.try_executor(tools, &mut lanes, Executor::Staged, &mut profile) {
        Ok(()) => Ok(Some(profile).filter(|profile| !profile.lacks_staging_memory())),
        Err(error) if error.ends_context() || trial.synchronize(&lanes).is_err() => {
            Err(trial.keep_while_in_use(error))
        }
        Err(error) => {
            tracing::warn!(
                gpu = tools.context.device().ordinal(),
                %error,
                "trial of staged copies failed; trying again later"
            );
            lanes.into_iter().for_each(CopyLane::drop_staging);
            Ok(None)
        }
    }
}

/// Memory of the trial on both sides. The host's is registered, as the arena's is.
struct TrialMemory {
    stream: Stream,
    pages: DeviceBuffer,
    // Before the memory, which must stay mapped while it is registered.
    registered: Result<RegisteredHost, CudaError>,
    host: Arena,
    /// Level of the host memory.
    memory: HostMemory,
    /// Bytes that depend on their position.
    pattern: Vec<u8>,
}

/// Pieces that are in flight together, each in its own slot.
struct Load {
    what: String,
    pieces: Vec<DeviceCopies>,
    /// Bytes from the start of each side that contain them.
    reach: usize,
}

impl TrialMemory {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let host = Arena::create(ArenaKind::Anonymous, BENCH_BYTES);
        let host = host.map_err(|error| CudaError::Call {
            function: "the memory of a trial",
            code: -1,
            name: error.to_string(),
        })?;
        // Not by the driver, whose other calls would wait meanwhile. It shows whether there is no memory.
        let _ = host.prefault(host.whole(), &AtomicBool::new(false), |_| {});
        // SAFETY: unregistered before the memory is freed, and the memory has no other user.
        let registered = unsafe { RegisteredHost::new(context, host.base(), BENCH_BYTES as usize) };
        let memory = match &registered {
            Ok(_) => HostMemory::of_registered(context, host.base()),
            Err(error) if error.ends_context() => return Err(error.clone()),
            Err(_) => HostMemory::Pageable,
        };
        Ok(Self {
            stream: Stream::new(context, 0)?,
            pages: DeviceBuffer::new(context, BENCH_BYTES)?,
            registered,
            host,
            memory,
            pattern: pattern(),
        })
    }

    /// Why the host memory does not suit an executor, if it does not.
    fn obstacle(&self, executor: Executor) -> Option<String> {
        if executor.with(self.memory) == executor {
            return None;
        }
        Some(match &self.registered {
            Ok(_) => "the GPU sees registered memory elsewhere than the host".to_owned(),
            Err(error) => format!("memory of the host cannot be registered: {error}"),
        })
    }

    /// Waits for the work of a failed trial.
    fn synchronize(&self, lanes: &[&mut CopyLane; 2]) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        lanes.iter().try_for_each(|lane| lane.finish())
    }

    /// Leaks the memory if work may still use it after this error; returns the error.
    fn keep_while_in_use(self, error: CudaError) -> CudaError {
        if !error.ends_context() {
            // Copies may still run.
            std::mem::forget(self);
        }
        error
    }

    /// Measures one executor and enters the result in the profile. After an error copies may still run.
    fn try_executor(
        &self,
        tools: &Tools,
        lanes: &mut [&mut CopyLane; 2],
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

    /// Measures one executor; returns why it is unavailable, if it is.
    fn executor(
        &self,
        lanes: &mut [&mut CopyLane; 2],
        executor: Executor,
        rates: &mut Rates,
    ) -> Result<Option<String>, CudaError> {
        for direction in [Direction::Store, Direction::Retrieve] {
            let lane = &mut *lanes[direction as usize];
            let wrong = self.one_way(lane, direction, executor, rates)?;
            // Not needed if another executor is chosen, and the other direction needs as much.
            lane.drop_staging();
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        Ok(None)
    }

    fn one_way(
        &self,
        lane: &mut CopyLane,
        direction: Direction,
        executor: Executor,
        rates: &mut Rates,
    ) -> Result<Option<String>, CudaError> {
        let mut slots = SLOTS;
        if executor == Executor::Staged {
            // Engines register after allocating their memory, so there may be memory for few slots.
            slots = 0;
            while slots < SLOTS && lane.has_staging_buffer(slots, Instant::now(), Duration::ZERO)? {
                slots += 1;
            }
            if slots == 0 {
                return Ok(Some(NO_STAGING_MEMORY.to_owned()));
            }
        }
        for (tried, run) in TRIED_RUNS.into_iter().enumerate() {
            let load = self.runs_of(run, slots as u64);
            match self.measure(lane, direction, executor, &load, ROUNDS)? {
                Ok(rate) => rates[direction as usize][executor as usize][tried] = Some(rate),
                Err(wrong) => return Ok(Some(wrong.to_string())),
            }
        }
        let tried = self.measure(lane, direction, executor, &self.unaligned(), 1)?;
        Ok(tried.err().map(|wrong| wrong.to_string()))
    }

    /// Copies a load `rounds` times and verifies every byte of the target; returns the best bytes per second, or why the
    /// executor is unavailable. The pieces are in flight together, as in service: submission time counts only as far as
    /// it delays other pieces.
    fn measure(
        &self,
        lane: &mut CopyLane,
        direction: Direction,
        executor: Executor,
        load: &Load,
        rounds: u32,
    ) -> Result<Result<f64, Error>, CudaError> {
        let unavailable = |why: &dyn std::fmt::Display| Error::new(ErrorKind::Unavailable, why);
        self.fill(direction, load.reach)?;
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let began = Instant::now();
            let submitted = load.pieces.iter().enumerate().map(|(slot, copies)| {
                // SAFETY: the copies are inside the two memories, which live until the lane has finished; the context
                // is current, and every slot is done.
                unsafe { lane.submit(slot, executor, copies, PinnedPieces::WHOLE) }
            });
            let submitted: Result<Vec<Executor>, CudaError> = submitted.collect();
            lane.finish()?;
            best = best.min(began.elapsed().as_secs_f64());
            match submitted {
                Ok(used) => {
                    if let Some(other) = used.iter().find(|used| **used != executor) {
                        let other = format_args!("it was replaced by {}", other.name());
                        return Ok(Err(unavailable(&other)));
                    }
                }
                Err(error) if error.ends_context() => return Err(error),
                Err(error)
                    if executor == Executor::Staged && error.code() == Some(OUT_OF_MEMORY) =>
                {
                    return Ok(Err(unavailable(&NO_STAGING_MEMORY)));
                }
                Err(error) => return Ok(Err(unavailable(&error))),
            }
        }
        if let Some(at) = self.first_wrong(direction, load)? {
            let what = &load.what;
            let wrong = format_args!("it moved wrong bytes: {direction:?}, {what}, byte {at}");
            return Ok(Err(unavailable(&wrong)));
        }
        let bytes: u64 = load
            .pieces
            .iter()
            .map(|piece| piece.run_lengths().bytes)
            .sum();
        Ok(Ok(bytes as f64 / best))
    }

    /// Runs that are not adjacent to the previous one: each piece reverses their order on one side.
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

    /// Copies with loops in another order on each side, and runs longer than a tile, with addresses and lengths that are
    /// multiples of 16, 8, 4, 2 and 1: every code path of the kernel.
    fn unaligned(&self) -> Load {
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

    /// Fills the source side with the pattern and the target side with [`FILLER`].
    fn fill(&self, direction: Direction, reach: usize) -> Result<(), CudaError> {
        let (pages, start) = (self.pages.base(), self.host.base().as_ptr());
        // SAFETY: the memory is ours, has this size, and no copy is running.
        let host = unsafe { std::slice::from_raw_parts_mut(start, reach) };
        host.copy_from_slice(&self.pattern[..reach]);
        // SAFETY: both sides have this size and live until the stream is synchronized below.
        unsafe {
            match direction {
                Direction::Store => self.stream.copy_to_device(pages, start, reach),
                Direction::Retrieve => self.stream.fill(pages, FILLER, reach),
            }
        }?;
        self.stream.synchronize()?;
        if direction == Direction::Store {
            host.fill(FILLER);
        }
        Ok(())
    }

    /// Offset of the first wrong byte of the target side, if any.
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
        let mut expected = vec![FILLER; load.reach];
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
        // One comparison first, as results are usually right.
        Ok(if written == expected {
            None
        } else {
            written
                .iter()
                .zip(&expected)
                .position(|(is, should)| is != should)
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
    fn fastest_executor_wins_and_copy_engines_win_ties() {
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
        let without_staging = |host| profile(&all).choose(Direction::Store, 4 << 10, host, false);
        assert_eq!(without_staging(mapped), Executor::Kernel);
        assert_eq!(without_staging(pinned), Executor::Batch);
        assert_eq!(without_staging(pageable), Executor::Plain);
    }

    #[test]
    fn run_length_uses_the_rate_measured_below_it() {
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
