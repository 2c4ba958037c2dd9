//! The command line: our flags, and the ones of LMCache that are only known.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory as _, value_parser};
use kvtier_common::error::Result;
use kvtier_l2::config::{ALLOWED_PATH, is_path};

use super::checks::refuse;

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
            let arg = arg.allow_negative_numbers(takes_values);
            let variable = arg.get_env().and_then(std::env::var_os);
            // A variable that is set and empty is not set. None has the name "".
            if variable.is_some_and(|value| value.is_empty()) {
                arg.env("")
            } else {
                arg
            }
        })
        .args(peer::args())
}

/// Refuses an invalid path of any flag, from the command line, the file or a variable.
pub(super) fn check_paths(command: &Command, given: &ArgMatches) -> Result<()> {
    let of_path = value_parser!(PathBuf).type_id();
    let of_path = |arg: &&clap::Arg| arg.get_value_parser().type_id() == of_path;
    for arg in command.get_arguments().filter(of_path) {
        let (id, flag) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        let Some(path) = given.get_one::<PathBuf>(id).filter(|path| !is_path(path)) else {
            continue;
        };
        let refused = refuse(flag, path.display(), &format!("give {ALLOWED_PATH}"));
        let is_variable = given.value_source(id) == Some(ValueSource::EnvVariable);
        return Err(match arg.get_env().filter(|_| is_variable) {
            Some(name) => refused.context(name.to_string_lossy()),
            None => refused,
        });
    }
    Ok(())
}
