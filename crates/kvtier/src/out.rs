//! What commands print.

use std::io::{ErrorKind, Result, Stdout, Write};

/// Stdout for results. Whoever reads them may stop whenever he has seen enough, as `head` does: the rest goes nowhere, and
/// the command ends as it would have.
pub(crate) fn stdout() -> Out {
    Out(std::io::stdout())
}

/// See [`stdout`].
pub(crate) struct Out(Stdout);

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        unless_closed(self.0.flush(), ())
    }
}

fn unless_closed<T>(outcome: Result<T>, otherwise: T) -> Result<T> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(otherwise),
        outcome => outcome,
    }
}
