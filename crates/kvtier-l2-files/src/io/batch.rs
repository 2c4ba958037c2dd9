//! Objects that are stored or loaded by one call.

use std::iter::Enumerate;
use std::os::fd::OwnedFd;

use kvtier_memory::uring::Tail;

use super::{Engine, FileWork, Move, Moved, lost};
use kvtier_l2::L2Error;

/// Store or load of one object.
pub(crate) trait FileOperation {
    type Done;

    /// Prepares the transfer with this number, which takes the tail.
    fn begin(&mut self, number: usize, tail: &mut Tail) -> Result<FileStep<Self::Done>, L2Error>;

    /// Ends the operation after its transfer.
    fn end(self, file: OwnedFd, tail: &mut Tail, moved: Moved) -> Result<Self::Done, L2Error>;

    /// The outcome of the transfer is lost.
    fn lost(self)
    where
        Self: Sized,
    {
    }
}

/// What an operation begins with.
pub(crate) enum FileStep<Done> {
    /// There is nothing to transfer.
    Done(Done),
    Moving(Move),
}

/// Operations, those of them that are in flight, and their results.
struct FileBatch<I, O: FileOperation> {
    operations: Enumerate<I>,
    in_flight: Vec<Option<O>>,
    results: Vec<Result<O::Done, L2Error>>,
    /// Tails that are not in use.
    tails: Vec<Tail>,
}

/// Runs operations on an engine; returns one result each, in order.
pub(crate) fn run<O: FileOperation>(
    engine: &dyn Engine,
    operations: impl ExactSizeIterator<Item = O>,
) -> Vec<Result<O::Done, L2Error>> {
    let mut batch = FileBatch {
        in_flight: (0..operations.len()).map(|_| None).collect(),
        results: (0..operations.len()).map(|_| Err(lost())).collect(),
        operations: operations.enumerate(),
        tails: Vec::new(),
    };
    engine.run(&mut batch);
    batch.results
}

impl<I: Iterator<Item = O>, O: FileOperation> FileWork for FileBatch<I, O> {
    fn next(&mut self) -> Option<Move> {
        loop {
            let (number, mut operation) = self.operations.next()?;
            let mut tail = self.tails.pop().unwrap_or_default();
            self.results[number] = match operation.begin(number, &mut tail) {
                Ok(FileStep::Moving(one)) => {
                    self.in_flight[number] = Some(operation);
                    return Some(one);
                }
                Ok(FileStep::Done(done)) => Ok(done),
                Err(error) => Err(error),
            };
            self.tails.push(tail);
        }
    }

    fn done(&mut self, one: Move, moved: Moved) {
        let mut tail = one.tail;
        if let Some(operation) = self.in_flight[one.number].take() {
            self.results[one.number] = operation.end(one.file, &mut tail, moved);
        }
        self.tails.push(tail);
    }

    fn lost(&mut self, number: usize) {
        if let Some(operation) = self.in_flight[number].take() {
            operation.lost();
        }
    }
}
