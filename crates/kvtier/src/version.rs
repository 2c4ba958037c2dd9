//! `kvtier version`: release, commit, target, and clients served.

use std::io::Write as _;
use std::process::ExitCode;

use crate::out;

/// Release, commit and target; the commit is left out where the build did not know it.
pub(crate) const TEXT: &str = env!("KVTIER_VERSION");

/// Releases of LMCache whose clients are served.
const CLIENTS: &str = "0.4.2 to 0.5.7";

/// Prints the version and the clients served.
pub(crate) fn print() -> anyhow::Result<ExitCode> {
    writeln!(
        out::stdout(),
        "kvtier {TEXT}\nserves clients of LMCache {CLIENTS}"
    )?;
    Ok(ExitCode::SUCCESS)
}
