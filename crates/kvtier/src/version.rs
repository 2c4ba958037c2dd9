//! `kvtier version`: release, commit, target, and clients served.

use std::io::Write as _;
use std::process::ExitCode;

use kvtier_client::proto::generation::served_releases;

use crate::out;

/// Release, commit and target; the commit is left out where the build did not know it.
pub(crate) const TEXT: &str = env!("KVTIER_VERSION");

/// Prints the version and the clients served.
pub(crate) fn print() -> anyhow::Result<ExitCode> {
    writeln!(
        out::stdout(),
        "kvtier {TEXT}\nserves clients of LMCache {}",
        served_releases()
    )?;
    Ok(ExitCode::SUCCESS)
}
