//! Where a server keeps what outlives its process.

use std::ffi::OsString;
use std::path::PathBuf;

use kvtier_common::error::{Error, Result};

use super::checks::refuse;
use super::flags::ServerArgs;
use super::values::L1Restore;

/// Location of what outlives a server's process.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSettings {
    /// The directory of all instances, or why nothing is kept.
    pub base: Result<PathBuf>,
    /// Name of this instance in it.
    pub instance: String,
}

/// What the default depends on.
struct Environment {
    is_root: bool,
    variable: fn(&str) -> Option<OsString>,
}

impl StateSettings {
    pub(super) fn of(args: &ServerArgs) -> Result<Self> {
        Self::within(
            args,
            &Environment {
                is_root: rustix::process::geteuid().is_root(),
                variable: |name| std::env::var_os(name),
            },
        )
    }

    fn within(args: &ServerArgs, environment: &Environment) -> Result<Self> {
        // Servers on a path may have the same port, which is none.
        let ipc = args.host.strip_prefix("ipc://");
        let instance = match (&args.instance_id, ipc) {
            (Some(id), _) if id.is_empty() => {
                return Err(refuse("instance-id", "\"\"", "give a name"));
            }
            (Some(id), _) => id.clone(),
            (None, Some(path)) => path.to_owned(),
            (None, None) => format!("kvtier-{}", args.port),
        };
        let has_name = args.instance_id.is_some() || ipc.is_some() || args.port != 0;
        let base = match &args.state_dir {
            Some(given) if given.as_os_str() == "none" => match args.l1_restore {
                L1Restore::On => {
                    let allowed =
                        "with --state-dir none nothing outlives the process; give it a directory";
                    return Err(refuse("l1-restore", "on", allowed));
                }
                L1Restore::Auto | L1Restore::Off => Err(Error::refused("--state-dir none")),
            },
            Some(given) => Ok(given.clone()),
            None if !has_name => {
                let why = "with --port 0 and no --instance-id no later server is the same";
                Err(Error::refused(why))
            }
            None => environment.default(),
        };
        Ok(Self { base, instance })
    }
}

impl Environment {
    fn default(&self) -> Result<PathBuf> {
        let directory = |name| {
            let value = (self.variable)(name)?;
            // Of systemd's, which has a colon between them, the first.
            let first = value.to_str()?.split(':').next()?;
            // Others are to be ignored, as the specification of XDG directories has it.
            first.starts_with('/').then(|| PathBuf::from(first))
        };
        if let Some(of_systemd) = directory("STATE_DIRECTORY") {
            return Ok(of_systemd);
        }
        if self.is_root {
            return Ok("/var/lib/kvtier".into());
        }
        let home = || Some(directory("HOME")?.join(".local/state"));
        let of_user = directory("XDG_STATE_HOME").or_else(home);
        let of_user = of_user.map(|base| base.join("kvtier"));
        of_user.ok_or_else(|| Error::refused("neither --state-dir nor $HOME is set"))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn settings(
        flags: &[&str],
        is_root: bool,
        variable: fn(&str) -> Option<OsString>,
    ) -> StateSettings {
        // The variable of the flag is in the environment of tests.
        let name = if flags.contains(&"--state-dir") {
            &[][..]
        } else {
            &["--state-dir", "none"]
        };
        let all = ["kvtier server"].iter().chain(name).chain(flags);
        let mut args = ServerArgs::try_parse_from(all).unwrap();
        if !name.is_empty() {
            args.state_dir = None;
        }
        StateSettings::within(&args, &Environment { is_root, variable }).unwrap()
    }

    fn base(flags: &[&str], is_root: bool, variable: fn(&str) -> Option<OsString>) -> String {
        let base = settings(flags, is_root, variable).base;
        base.map_or_else(
            |why| format!("none: {why}"),
            |base| base.display().to_string(),
        )
    }

    #[test]
    fn default_directory_depends_on_user_and_environment() {
        let systemd = |name: &str| match name {
            "STATE_DIRECTORY" => Some("/var/lib/private/kvtier:/other".into()),
            _ => Some("/home/x".into()),
        };
        let xdg = |name: &str| match name {
            "XDG_STATE_HOME" => Some("/state".into()),
            "HOME" => Some("/home/x".into()),
            _ => None,
        };
        let home = |name: &str| match name {
            // Relative paths do not count.
            "XDG_STATE_HOME" => Some("state".into()),
            "HOME" => Some("/home/x".into()),
            _ => None,
        };
        for is_root in [false, true] {
            assert_eq!(base(&[], is_root, systemd), "/var/lib/private/kvtier");
        }
        assert_eq!(base(&[], true, xdg), "/var/lib/kvtier");
        assert_eq!(base(&[], false, xdg), "/state/kvtier");
        assert_eq!(base(&[], false, home), "/home/x/.local/state/kvtier");
        assert!(base(&[], false, |_| None).starts_with("none: "));
        assert_eq!(base(&["--state-dir", "/s"], true, systemd), "/s");
        assert_eq!(
            base(&["--state-dir", "none"], true, systemd),
            "none: --state-dir none"
        );
    }

    #[test]
    fn instance_is_what_finds_the_server_again() {
        let instance = |flags: &[&str]| settings(flags, true, |_| None).instance;
        assert_eq!(instance(&[]), "kvtier-5555");
        assert_eq!(instance(&["--port", "7"]), "kvtier-7");
        assert_eq!(instance(&["--port", "7", "--instance-id", "a"]), "a");
        assert_eq!(instance(&["--host", "ipc:///run/k"]), "/run/k");
        assert_eq!(
            base(&["--port", "0", "--instance-id", "a"], true, |_| None),
            "/var/lib/kvtier"
        );
        let nameless = base(&["--port", "0"], true, |_| None);
        assert!(nameless.starts_with("none: with --port 0"), "{nameless}");
        assert_eq!(
            base(&["--port", "0", "--state-dir", "/s"], true, |_| None),
            "/s"
        );
    }

    #[test]
    fn l1_that_is_to_be_restored_needs_a_directory() {
        let with = |flags: &[&str]| {
            let flags = [&["--l1-size-gb", "1", "--l1-restore", "on"], flags].concat();
            crate::ServerConfig::from_flags(&flags)
        };
        let error = with(&["--state-dir", "none"]).unwrap_err().to_string();
        for part in ["--l1-restore: on", "--state-dir none"] {
            assert!(error.contains(part), "{error}");
        }
        let config = with(&["--state-dir", "/s"]).unwrap();
        assert_eq!(config.l1_restore, L1Restore::On);
        assert_eq!(config.state.base, Ok("/s".into()));
        let flags = ["--l1-size-gb", "1", "--state-dir", "none"];
        let config = crate::ServerConfig::from_flags(&flags).unwrap();
        assert_eq!(config.l1_restore, L1Restore::Auto);
        assert_eq!(config.state.base, Err(Error::refused("--state-dir none")));
    }

    #[test]
    fn empty_names_are_refused() {
        for flags in [["--state-dir", ""], ["--instance-id", ""]] {
            let error = crate::ServerConfig::from_flags(&flags).unwrap_err();
            assert!(error.to_string().contains(flags[0]), "{error}");
        }
    }
}
