//! The signal to stop: a flag for commands that Ctrl-C and SIGTERM set.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a command that was interrupted, as in shells.
pub(crate) const INTERRUPTED: u8 = 130;

/// Signals that stop.
const STOP: [SignalKind; 2] = [SignalKind::interrupt(), SignalKind::terminate()];

/// A flag that the first SIGINT or SIGTERM sets; the second ends the process.
///
/// # Errors
/// If the process can have no thread, or no handler, for them.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    flag_at(&STOP, |is_again| {
        if is_again {
            std::process::exit(i32::from(INTERRUPTED));
        }
        eprintln!("stopping; repeat to stop at once");
    })
}

/// A flag that these signals set. `seen` is called at each, with whether it was set already.
///
/// # Errors
/// If the process can have no thread, or no handler, for them.
pub fn flag_at(kinds: &[SignalKind], seen: fn(bool)) -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("cannot wait for signals")?;
    for kind in kinds {
        let _inside = runtime.enter();
        let (mut signal, flag) = (signal(*kind)?, Arc::clone(&flag));
        runtime.spawn(async move {
            while signal.recv().await.is_some() {
                seen(flag.swap(true, Ordering::Relaxed));
            }
        });
    }
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(flag)
}
