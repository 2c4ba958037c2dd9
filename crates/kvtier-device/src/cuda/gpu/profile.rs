//! How fast each executor is on this GPU, and whether it is right: tried out before the GPU is used.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::CopyLoop;

use super::super::device_copy::{DeviceCopies, DeviceCopy, PinnedPieces};
use super::super::driver::{Context, DeviceBuffer, HostBuffer, Stream};
use super::super::error::CudaError;
use super::executor::{Executor, HostMemory, Lane, Tools};
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
/// Bytes moved in a trial: enough for a full link, but no more than this many runs, for the slowest executor takes a
/// microsecond for each.
const TRIAL_BYTES: u64 = 4 << 20;
const TRIAL_RUNS: u64 = 2048;
/// Trials of each; the best counts.
const ROUNDS: u32 = 3;
/// How much slower an executor may be than the fastest and be taken because it disturbs less. Without NVIDIA's MPS a
/// kernel of ours and the model's take turns, so what keeps no multiprocessor busy is worth some speed.
const AS_FAST: f64 = 0.9;

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
}

impl Profile {
    /// The executor for a piece whose runs have `mean` bytes on average and are in such memory of the host.
    pub(super) fn choose(&self, direction: Direction, mean: u64, host: HostMemory) -> Executor {
        // The longest one tried that is no longer.
        let tried = TRIED_RUNS.partition_point(|run| *run <= mean);
        let tried = tried.saturating_sub(1);
        let rate = |executor: &Executor| {
            let usable = executor.with(host) == *executor;
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
}

/// Tries every executor both ways, on idle lanes for stores and retrieves. An executor that cannot be used, fails, or
/// moves wrong bytes is left out.
///
/// # Errors
/// What the driver says where it is about more than an executor.
pub(super) fn try_out(tools: &Tools, lanes: &mut [Lane; 2]) -> Result<Profile, CudaError> {
    let mut profile = Profile::default();
    let mut bench = Bench::new(&tools.context)?;
    for executor in Executor::ALL {
        let tried = match tools.obstacle(executor) {
            Some(obstacle) => Ok(Some(obstacle)),
            None => bench.executor(lanes, executor, &mut profile.rates),
        };
        match tried {
            Ok(None) => {}
            Ok(Some(obstacle)) => {
                for rates in &mut profile.rates {
                    rates[executor as usize] = Default::default();
                }
                profile.obstacles.push((executor, obstacle));
            }
            Err(error) => {
                if !error.ends_context() {
                    // Nobody knows whether anything still moves.
                    std::mem::forget(bench);
                }
                return Err(error);
            }
        }
    }
    Ok(profile)
}

/// Memory on both sides for trials.
struct Bench {
    stream: Stream,
    pages: DeviceBuffer,
    host: HostBuffer,
    /// Bytes that tell their position.
    pattern: Vec<u8>,
}

impl Bench {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let byte = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        Ok(Self {
            stream: Stream::new(context, 0)?,
            pages: context.allocate(TRIAL_BYTES)?,
            host: context.allocate_host(TRIAL_BYTES as usize)?,
            pattern: (0..TRIAL_BYTES).map(byte).collect(),
        })
    }

    /// Tries one executor; gives what is wrong with it.
    fn executor(
        &mut self,
        lanes: &mut [Lane; 2],
        executor: Executor,
        rates: &mut Rates,
    ) -> Result<Option<String>, CudaError> {
        for direction in [Direction::Store, Direction::Retrieve] {
            let lane = &mut lanes[direction as usize];
            for (tried, run) in TRIED_RUNS.into_iter().enumerate() {
                let copies = self.copies(run);
                let bytes = copies.run_lengths().bytes;
                self.fill(direction, bytes as usize)?;
                let mut best = f64::INFINITY;
                for _ in 0..ROUNDS {
                    let began = Instant::now();
                    // SAFETY: the copies are inside the two buffers, which live until the lane has finished; the
                    // context is current, and every slot is done.
                    let used = unsafe { lane.put(0, executor, &copies, PinnedPieces::WHOLE) };
                    lane.finish()?;
                    best = best.min(began.elapsed().as_secs_f64());
                    match used {
                        Ok(used) if used == executor => {}
                        Ok(used) => return Ok(Some(format!("it gave way to {}", used.name()))),
                        Err(error) if error.ends_context() => return Err(error),
                        Err(error) => return Ok(Some(error.to_string())),
                    }
                }
                if let Some(run_number) =
                    self.first_wrong(direction, run as usize, bytes as usize)?
                {
                    return Ok(Some(format!(
                        "it moved wrong bytes: {direction:?}, run {run_number} of {run} bytes"
                    )));
                }
                rates[direction as usize][executor as usize][tried] = Some(bytes as f64 / best);
            }
        }
        Ok(None)
    }

    /// Runs that adjoin on neither side with the one before: the last one first on one side.
    fn copies(&self, run: u64) -> DeviceCopies {
        let runs = (TRIAL_BYTES / run).min(TRIAL_RUNS);
        let mut copies = DeviceCopies::default();
        for number in 0..runs {
            copies.push(DeviceCopy {
                engine: self.pages.base().0 + (runs - 1 - number) * run,
                host: self.host.base().as_ptr() as u64 + number * run,
                inner_bytes: run,
                loops: [CopyLoop::ONCE; 3],
            });
        }
        copies
    }

    /// Puts the pattern into the side that is read, and something else into the other.
    fn fill(&mut self, direction: Direction, bytes: usize) -> Result<(), CudaError> {
        let other = 0xa5;
        let Self {
            stream,
            pages,
            host,
            pattern,
        } = self;
        let (pages, start) = (pages.base(), host.base().as_ptr());
        // SAFETY: the buffer is ours, has these bytes, and nothing copies now.
        let host = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
        host.copy_from_slice(&pattern[..bytes]);
        // SAFETY: both buffers have these bytes and live until the stream has ended, here.
        unsafe {
            match direction {
                Direction::Store => stream.copy_to_device(pages, start, bytes),
                Direction::Retrieve => stream.fill(pages, other, bytes),
            }
        }?;
        stream.synchronize()?;
        if direction == Direction::Store {
            host.fill(other);
        }
        Ok(())
    }

    /// The first run that is not where it should be, if there is one.
    fn first_wrong(
        &mut self,
        direction: Direction,
        run: usize,
        bytes: usize,
    ) -> Result<Option<usize>, CudaError> {
        let start = self.host.base().as_ptr();
        if direction == Direction::Retrieve {
            // SAFETY: as in `fill`.
            unsafe { self.stream.copy_to_host(start, self.pages.base(), bytes) }?;
            self.stream.synchronize()?;
        }
        // SAFETY: as in `fill`.
        let host = unsafe { std::slice::from_raw_parts(start.cast_const(), bytes) };
        let sources = self.pattern[..bytes].chunks(run).rev();
        Ok(host
            .chunks(run)
            .zip(sources)
            .position(|(is, should)| is != should))
    }
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
        let choose = |rates: &[_], host| profile(rates).choose(Direction::Store, 4 << 10, host);
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
        let choose = |mean| profile.choose(Direction::Retrieve, mean, HostMemory::Mapped);
        assert_eq!(choose(1), Executor::Kernel);
        assert_eq!(choose(256), Executor::Kernel);
        assert_eq!(choose(1023), Executor::Kernel);
        assert_eq!(choose(256 << 10), Executor::Batch);
        assert_eq!(choose(u64::MAX), Executor::Batch);
    }
}
