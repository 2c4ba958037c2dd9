//! A flag that Ctrl-C and SIGTERM set.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a command that a signal ended, as shells have it for SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;

/// The flag; a second signal ends the process at once.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("cannot wait for signals")?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    if flag.swap(true, Ordering::Relaxed) {
                        std::process::exit(i32::from(INTERRUPTED));
                    }
                    eprintln!("stopping; once more to stop at once");
                }
            });
        })?;
    Ok(stop)
}
