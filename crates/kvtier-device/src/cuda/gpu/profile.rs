//! How fast each executor is on this GPU, and whether it is right: tried out before the GPU is used.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::CopyLoop;

use super::super::device_copy::{DeviceCopies, DeviceCopy, PinnedPieces};
use super::super::driver::DevicePtr;
use super::super::error::CudaError;
use super::executor::{Executor, Lane, Tools};
use crate::plan::Direction;

/// Lengths of runs that are tried, in bytes.
pub const TRIED_RUNS: [u64; 6] = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Bytes moved in a trial: enough for a full link, but no more than this many runs, for the slowest executor takes a
/// microsecond for each.
const TRIAL_BYTES: u64 = 4 << 20;
const TRIAL_RUNS: u64 = 2048;
/// Trials of each; the best counts.
const ROUNDS: u32 = 3;
/// How much slower an executor may be than the fastest and be taken because it disturbs less.
const AS_FAST: f64 = 0.95;

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
    /// The executor for a piece whose runs have `mean` bytes on average.
    ///
    /// `straight` says that the GPU reaches the host's memory by the same addresses; without it the kernel cannot, and
    /// a batch gains nothing.
    pub fn choose(&self, direction: Direction, mean: u64, straight: bool) -> Executor {
        let tried = TRIED_RUNS.partition_point(|run| *run < mean);
        let tried = tried.min(TRIED_RUNS.len() - 1);
        let rate = |executor: &Executor| {
            let usable = straight || matches!(executor, Executor::Staged | Executor::Plain);
            self.rates[direction as usize][*executor as usize][tried].filter(|_| usable)
        };
        let best = Executor::ALL.iter().filter_map(rate).fold(0.0, f64::max);
        let fast = |executor: &Executor| rate(executor).is_some_and(|rate| rate >= AS_FAST * best);
        Executor::ALL
            .into_iter()
            .find(fast)
            .unwrap_or(Executor::Plain)
    }
}

/// Tries every executor both ways. An executor that cannot be used, fails, or moves wrong bytes is left out.
///
/// # Errors
/// What the driver says where it is about more than an executor.
pub(super) fn try_out(tools: &Arc<Tools>) -> Result<Profile, CudaError> {
    let mut profile = Profile::default();
    let mut bench = Bench::new(tools)?;
    for executor in Executor::ALL {
        let tried = match tools.obstacle(executor) {
            Some(obstacle) => Err(obstacle),
            None => bench.executor(executor, &mut profile.rates),
        };
        if let Err(obstacle) = tried {
            for rates in &mut profile.rates {
                rates[executor as usize] = Default::default();
            }
            profile.obstacles.push((executor, obstacle));
        }
    }
    Ok(profile)
}

/// Memory on both sides for trials.
struct Bench<'a> {
    tools: &'a Arc<Tools>,
    pages: super::super::driver::DeviceBuffer,
    host: super::super::driver::HostBuffer,
    lanes: [Lane; 2],
}

impl<'a> Bench<'a> {
    fn new(tools: &'a Arc<Tools>) -> Result<Self, CudaError> {
        Ok(Self {
            pages: tools.context.allocate(TRIAL_BYTES)?,
            host: tools.context.allocate_host(TRIAL_BYTES as usize)?,
            lanes: [
                Lane::new(tools, Direction::Store)?,
                Lane::new(tools, Direction::Retrieve)?,
            ],
            tools,
        })
    }

    fn executor(&mut self, executor: Executor, rates: &mut Rates) -> Result<(), String> {
        let error = |error: CudaError| error.to_string();
        for direction in [Direction::Store, Direction::Retrieve] {
            for (tried, run) in TRIED_RUNS.into_iter().enumerate() {
                let copies = self.copies(run);
                let bytes = copies.run_lengths().bytes;
                self.fill(direction, bytes).map_err(error)?;
                let mut best = f64::INFINITY;
                for _ in 0..ROUNDS {
                    let began = Instant::now();
                    let lane = &mut self.lanes[direction as usize];
                    // SAFETY: the copies are inside the two buffers, which live until the lane has finished; the
                    // context is current, and every slot is done.
                    let used = unsafe { lane.put(0, executor, &copies, PinnedPieces::WHOLE) };
                    lane.finish().map_err(error)?;
                    if used.map_err(error)? != executor {
                        return Err("it gave way to another executor".to_owned());
                    }
                    best = best.min(began.elapsed().as_secs_f64());
                }
                self.check(direction, run, bytes)
                    .map_err(error)?
                    .map_err(|at| {
                        format!(
                            "it moved wrong bytes: runs of {run} bytes, {direction:?}, byte {at}"
                        )
                    })?;
                rates[direction as usize][executor as usize][tried] = Some(bytes as f64 / best);
            }
        }
        Ok(())
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

    /// A byte that its position tells.
    fn pattern(at: u64) -> u8 {
        ((at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 56) as u8
    }

    /// Puts a pattern into the side that is read, and something else into the other.
    fn fill(&mut self, direction: Direction, bytes: u64) -> Result<(), CudaError> {
        let store = direction == Direction::Store;
        self.set_host(bytes, |at| match store {
            true => Self::pattern(at),
            false => !Self::pattern(at),
        });
        let copy = |bench: &Self| {
            let stream = super::super::driver::Stream::new(&bench.tools.context, 0)?;
            // SAFETY: both buffers have these bytes and live until the copy has ended.
            unsafe {
                stream.copy_to_device(
                    bench.pages.base(),
                    bench.host.base().as_ptr(),
                    bytes as usize,
                )
            }?;
            stream.synchronize()
        };
        copy(self)?;
        self.set_host(bytes, |at| match store {
            true => !Self::pattern(at),
            false => Self::pattern(at),
        });
        Ok(())
    }

    fn set_host(&mut self, bytes: u64, value: impl Fn(u64) -> u8) {
        // SAFETY: the buffer is ours, has these bytes, and nothing copies now.
        let host =
            unsafe { std::slice::from_raw_parts_mut(self.host.base().as_ptr(), bytes as usize) };
        host.iter_mut()
            .zip(0..)
            .for_each(|(byte, at)| *byte = value(at));
    }

    /// Whether the pattern is where it should be; if not, the first byte that is wrong.
    fn check(
        &mut self,
        direction: Direction,
        run: u64,
        bytes: u64,
    ) -> Result<Result<(), u64>, CudaError> {
        if direction == Direction::Retrieve {
            let stream = super::super::driver::Stream::new(&self.tools.context, 0)?;
            let from = DevicePtr(self.pages.base().0);
            // SAFETY: as in `fill`.
            unsafe {
                stream.copy_to_host(self.host.base().as_ptr(), from, bytes as usize)?;
            }
            stream.synchronize()?;
        }
        // SAFETY: as in `set_host`.
        let host = unsafe {
            std::slice::from_raw_parts(self.host.base().as_ptr().cast_const(), bytes as usize)
        };
        let runs = bytes / run;
        let wrong = host.iter().zip(0..bytes).position(|(byte, at)| {
            let source = (runs - 1 - at / run) * run + at % run;
            *byte != Self::pattern(source)
        });
        Ok(wrong.map_or(Ok(()), |at| Err(at as u64)))
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
        let choose =
            |rates: &[_], straight| profile(rates).choose(Direction::Store, 4 << 10, straight);
        let all = [
            (Executor::Batch, 20.0),
            (Executor::Kernel, 50.0),
            (Executor::Staged, 45.0),
            (Executor::Plain, 1.0),
        ];
        assert_eq!(choose(&all, true), Executor::Kernel);
        // Memory that is not pinned.
        assert_eq!(choose(&all, false), Executor::Staged);
        let near = [(Executor::Batch, 48.0), (Executor::Kernel, 50.0)];
        assert_eq!(choose(&near, true), Executor::Batch);
        assert_eq!(choose(&near, false), Executor::Plain);
        assert_eq!(choose(&[], true), Executor::Plain);
    }

    #[test]
    fn a_length_is_taken_for_the_next_one_that_was_tried() {
        let mut profile = Profile::default();
        for (tried, executor) in [(0, Executor::Kernel), (5, Executor::Batch)] {
            profile.rates[Direction::Retrieve as usize][executor as usize][tried] = Some(1.0);
        }
        let choose = |mean| profile.choose(Direction::Retrieve, mean, true);
        assert_eq!(choose(1), Executor::Kernel);
        assert_eq!(choose(256), Executor::Kernel);
        assert_eq!(choose((64 << 10) + 1), Executor::Batch);
        assert_eq!(choose(u64::MAX), Executor::Batch);
    }
}
