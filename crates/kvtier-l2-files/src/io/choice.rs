//! Choice of the I/O engine.
//!
//! `auto` is io_uring past the page cache and POSIX calls through it: there, small files are no faster with io_uring, and
//! with direct I/O large ones are (`benches/README.md`, "A second tier").

use super::nixl::{Nixl, NixlOptions};
use super::uring::Uring;
use super::{Engine, Posix};
use kvtier_l2::{ErrorKind, L2Error};

/// I/O engine between files and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoEngine {
    /// io_uring with `use_odirect` if it is available, else POSIX calls.
    #[default]
    Auto,
    /// One POSIX call per thread at a time.
    Posix,
    /// Several operations in flight per thread.
    Uring,
    /// NIXL, which has to be installed.
    Nixl,
}

/// An I/O engine and the reason for it.
pub(crate) struct Choice {
    pub engine: Box<dyn Engine>,
    pub reason: String,
}

impl Choice {
    fn new(engine: impl Engine + 'static, reason: impl Into<String>) -> Self {
        Self {
            engine: Box::new(engine),
            reason: reason.into(),
        }
    }
}

impl IoEngine {
    /// Returns the engine of a word in a configuration.
    pub(crate) fn of(word: &str) -> Self {
        match word {
            "posix" => Self::Posix,
            "io_uring" => Self::Uring,
            "nixl" => Self::Nixl,
            _ => Self::Auto,
        }
    }
}

/// Chooses the engine for the configured value and `use_odirect`.
///
/// # Errors
/// If io_uring or NIXL is configured and not available.
pub(crate) fn choose(
    configured: IoEngine,
    use_odirect: bool,
    nixl: &NixlOptions,
) -> Result<Choice, L2Error> {
    choose_from(configured, use_odirect, Uring::new, || by_nixl(nixl))
}

fn choose_from<U: Engine + 'static>(
    configured: IoEngine,
    use_odirect: bool,
    uring: impl FnOnce() -> std::io::Result<U>,
    nixl: impl FnOnce() -> Result<Choice, L2Error>,
) -> Result<Choice, L2Error> {
    match (configured, use_odirect) {
        (IoEngine::Posix, _) => Ok(Choice::new(Posix, "io_engine is \"posix\"")),
        (IoEngine::Uring, _) => match uring() {
            Ok(uring) => Ok(Choice::new(uring, "io_engine is \"io_uring\"")),
            Err(error) => Err(refused(format!(
                "io_engine is \"io_uring\", which is not available on this system: {error}; set \"posix\" or \"auto\""
            ))),
        },
        (IoEngine::Nixl, _) => nixl(),
        (IoEngine::Auto, false) => Ok(Choice::new(Posix, "use_odirect is off")),
        (IoEngine::Auto, true) => Ok(match uring() {
            Ok(uring) => Choice::new(uring, "use_odirect is on"),
            Err(error) => Choice::new(Posix, format!("io_uring is not available: {error}")),
        }),
    }
}

fn by_nixl(options: &NixlOptions) -> Result<Choice, L2Error> {
    let nixl = Nixl::new(options).map_err(|error| {
        refused(format!(
            "io_engine is \"nixl\", which is not available: {error}. Its path is the key nixl_library; without NIXL set \"auto\""
        ))
    })?;
    let reason = format!("io_engine is \"nixl\": {}", nixl.description());
    Ok(Choice::new(nixl, reason))
}

fn refused(message: String) -> L2Error {
    L2Error::new(ErrorKind::Refused, message)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    /// Engine with the name of io_uring.
    struct FakeUring;

    impl Engine for FakeUring {
        fn name(&self) -> &'static str {
            "io_uring"
        }
    }

    fn no_nixl() -> Result<Choice, L2Error> {
        panic!("it is not configured")
    }

    fn unavailable() -> std::io::Result<FakeUring> {
        Err(Errno::NOSYS.into())
    }

    #[test]
    fn auto_is_io_uring_with_odirect_only() {
        for (use_odirect, name, reason) in [
            (false, "posix", "use_odirect is off"),
            (true, "io_uring", "use_odirect is on"),
        ] {
            let choice =
                choose_from(IoEngine::Auto, use_odirect, || Ok(FakeUring), no_nixl).unwrap();
            assert_eq!((choice.engine.name(), &*choice.reason), (name, reason));
        }
    }

    #[test]
    fn configured_engine_is_used_with_and_without_odirect() {
        for (configured, name) in [(IoEngine::Uring, "io_uring"), (IoEngine::Posix, "posix")] {
            for use_odirect in [false, true] {
                let choice =
                    choose_from(configured, use_odirect, || Ok(FakeUring), no_nixl).unwrap();
                assert_eq!(choice.engine.name(), name);
                assert!(choice.reason.contains("io_engine"), "{}", choice.reason);
            }
        }
    }

    #[test]
    fn missing_io_uring_is_posix_or_refused() {
        let choice = choose_from(IoEngine::Auto, true, unavailable, no_nixl).unwrap();
        assert_eq!(choice.engine.name(), "posix");
        assert!(choice.reason.contains("not available"), "{}", choice.reason);
        let error = choose_from(IoEngine::Uring, false, unavailable, no_nixl).err();
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("io_engine"), "{error}");
    }
}
