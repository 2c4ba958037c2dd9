//! `kvtier version`: what this program is and was built from.

use std::io::Write as _;
use std::process::ExitCode;

use crate::out;

/// Release, commit and target; the commit is left out where the build did not know it.
pub(crate) const TEXT: &str = env!("KVTIER_VERSION");

/// Releases of LMCache whose clients are served.
const CLIENTS: &str = "0.5.3 to 0.5.6";

/// Prints it, with what it serves.
pub(crate) fn print() -> anyhow::Result<ExitCode> {
    writeln!(
        out::stdout(),
        "kvtier {TEXT}\nserves clients of LMCache {CLIENTS}"
    )?;
    Ok(ExitCode::SUCCESS)
}
