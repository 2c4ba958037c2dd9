//! The command line: our flags, and the ones of LMCache that are only known.

use clap::{Command, CommandFactory as _};

use super::flags::ServerArgs;
use super::peer;

/// `kvtier server` with its flags, for completions and man pages. What is only known for LMCache's sake is left out.
pub fn server_command() -> Command {
    ServerArgs::command()
}

/// The whole command.
pub(super) fn command() -> Command {
    // A number below 0 is a value; its flag decides whether it is allowed.
    ServerArgs::command()
        .mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_values)
        })
        .args(peer::args())
}
