//! `kvtier server`: a server in the foreground, until a signal stops it.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use kvtier_common::error::{Error, ErrorKind};
use kvtier_l2::AdapterConfig;
use kvtier_server::config::{L1Restore, in_gib};
use kvtier_server::preflight::EarlierL1;
use kvtier_server::{Inherited, Parsed, RunMode, Server, ServerConfig, end_process, preflight};

use crate::USAGE;
use crate::inherited;
use crate::notify::Notifier;
use crate::out::{self, complain};
use crate::signals::{SIGINT, ServerSignals};

/// How long the exit handlers of libraries may take after a start that failed: one of a GPU driver may not return.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Arguments of `kvtier server`; the library parses them, together with the file behind `--config`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct ServerCommand {
    /// Flags of the server; `kvtier server --help` lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "FLAGS"
    )]
    flags: Vec<OsString>,
}

/// Runs the server. Ends with SIGTERM or SIGINT, exit code 0, or 1 when that took too long.
pub fn run(command: ServerCommand) -> anyhow::Result<ExitCode> {
    // First: so far this process has opened nothing, and no program that it starts may have them.
    let sockets = inherited::sockets().and_then(Inherited::new);
    let config = match ServerConfig::parse(command.flags) {
        Ok(Parsed::Run {
            config,
            mode: RunMode::Check,
        }) => {
            return check(&config, sockets);
        }
        Ok(Parsed::Run {
            config,
            mode: RunMode::Start,
        }) => *config,
        Ok(Parsed::Print(text)) => {
            write!(out::stdout(), "{text}")?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => {
            complain("server", error);
            return Ok(ExitCode::from(USAGE));
        }
    };
    let sockets = match checked(&config, sockets) {
        Ok(sockets) => sockets,
        Err(error) => return Ok(refuse(&error)),
    };
    let log = kvtier_server::logging::init(&config).context("no thread for the log")?;
    if !config.ignored.is_empty() {
        tracing::warn!(
            flags = config.ignored.join(", "),
            "flags without effect (--strict-flags refuses them)"
        );
    }
    // Before anything is created that a signal would have to clean up.
    let mut signals = ServerSignals::listen().context("cannot listen for signals")?;
    let server = match Server::start_on(config, sockets) {
        Ok(server) => server,
        Err(error) => {
            // What the log has to say comes first.
            drop(log);
            complain("server", error);
            end_after(EXIT_TIMEOUT, || 1).context("no thread to watch the end")?;
            return Ok(ExitCode::FAILURE);
        }
    };
    tracing::info!(
        endpoint = server.endpoint(),
        http = format!("{}://{}", server.access().scheme(), server.http_address()),
        l1_bytes = server.engine().config().l1_bytes,
        l1_size = server.engine().config().l1_origin(),
        chunk_size = server.engine().config().chunk_size,
        version = env!("CARGO_PKG_VERSION"),
        "serving"
    );
    let notifier = Arc::new(Notifier::from_environment(format!(
        "serving on {}, {}://{}",
        server.endpoint(),
        server.access().scheme(),
        server.http_address()
    )));
    notifier.ready();
    let signal = signals.wait(&server, &notifier);
    tracing::info!(signal, "stopping");
    if signal == SIGINT {
        // An operator at a terminal starts no successor, and the memory would stay.
        server.engine().end_l1();
    }
    notifier.stopping(server.stop_limit());
    end_in_time(&server).context("no thread to watch the stop")?;
    server.stop();
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Ends the process if its stop takes too long, the exit handlers of libraries included: a call to a GPU driver that
/// does not answer never returns, and the system takes everything back from a process that has ended. That is as good an
/// end as any if only pinned memory was left; much of it takes long to release.
fn end_in_time(server: &Server) -> std::io::Result<()> {
    let limit = server.stop_limit();
    // The engine is not held: it is to end with the server.
    let engine = Arc::downgrade(server.engine());
    end_after(limit, move || {
        let engine = engine.upgrade();
        let drained = engine.is_some_and(|engine| {
            engine.abandon();
            engine.is_drained()
        });
        let limit = limit.as_secs_f64();
        if drained {
            tracing::info!(limit, "stopped; the system takes back what is still pinned")
        } else {
            tracing::error!(
                limit,
                "not stopped in time (--stop-timeout-seconds): the process ends now"
            )
        }
        i32::from(!drained)
    })
}

/// Ends the process after this time, with the code that `end` returns.
fn end_after(limit: Duration, end: impl FnOnce() -> i32 + Send + 'static) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("kvtier-stop".into());
    let wait = move || {
        std::thread::sleep(limit);
        end_process(end())
    };
    thread.spawn(wait).map(drop)
}

/// Returns the inherited sockets of a configuration with which a server could start.
fn checked(
    config: &ServerConfig,
    sockets: kvtier_common::error::Result<Inherited>,
) -> kvtier_common::error::Result<Inherited> {
    let sockets = sockets?;
    preflight::check(config, &sockets)?;
    Ok(sockets)
}

/// Prints why there is no start; bad usage, unless another server has the socket.
fn refuse(error: &Error) -> ExitCode {
    complain("server", error);
    match error.kind() {
        ErrorKind::InUse => ExitCode::FAILURE,
        _ => ExitCode::from(USAGE),
    }
}

/// `--check-config`: says what a server would do, and what is against it.
fn check(
    config: &ServerConfig,
    sockets: kvtier_common::error::Result<Inherited>,
) -> anyhow::Result<ExitCode> {
    let mut out = out::stdout();
    let shortage = config.shm_shortage();
    let l2 = config.l2.as_ref();
    let sockets = match checked(config, sockets) {
        Ok(sockets) => sockets,
        Err(error) => return Ok(refuse(&error)),
    };
    let found = match preflight::reserve(config, sockets) {
        Ok(found) => found,
        Err(error) => {
            complain("server", error);
            return Ok(ExitCode::FAILURE);
        }
    };
    let mut tried = Vec::new();
    for (name, adapter, untried) in l2.into_iter().flat_map(|l2| l2.trials()) {
        if let Some(reason) = untried {
            tried.push(format!("L2 tier {name}: not tried: {reason}"));
            continue;
        }
        match try_out(adapter) {
            Ok(probed) => tried.push(format!("L2 tier {name}: {probed}")),
            Err(error) => {
                complain("server", format_args!("L2 tier {name}: {error}"));
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    writeln!(
        out,
        "configuration OK: L1 of {:.2} GiB ({}), chunks of {} tokens",
        in_gib(config.l1_bytes),
        config.l1_origin(),
        config.chunk_size
    )?;
    let ports = ports(config);
    if !ports.is_empty() {
        writeln!(out, "ports bound and released: {}", ports.join(", "))?;
    }
    for tier in l2.into_iter().flat_map(|l2| l2.tiers()) {
        writeln!(out, "{tier}")?;
    }
    for line in tried {
        writeln!(out, "{line}")?;
    }
    if let Ok(path) = &found.state {
        let what = if path.exists() { "used again" } else { "new" };
        writeln!(out, "state directory: {}, {what}", path.display())?;
    }
    let unkept = match found.kept {
        Ok(path) => {
            writeln!(out, "L1 stays for the next server, in {}", path.display())?;
            None
        }
        Err(why) if config.l1_restore == L1Restore::On => {
            Some(format!("L1 ends with the process: {why}"))
        }
        Err(why) => {
            writeln!(out, "L1 ends with the process: {why}")?;
            None
        }
    };
    let unused = found.state.err().filter(|_| config.state.base.is_ok());
    let unused = unused
        .map(|error| format!("{error}; nothing that is set at run time outlives the process"));
    let earlier = "L1 of an earlier server is there, and is";
    match found.earlier {
        EarlierL1::Absent => {}
        EarlierL1::Kept(objects) => {
            writeln!(out, "{earlier} kept, with {objects} objects")?;
        }
        EarlierL1::Replaced(why) => writeln!(out, "{earlier} replaced: {why}")?,
        EarlierL1::Removed(path) => {
            writeln!(out, "{earlier} removed: {}", path.display())?;
        }
    }
    match found.gpus {
        Ok(names) => writeln!(out, "{} GPUs: {}", names.len(), names.join(", "))?,
        Err(why) => writeln!(out, "no GPUs: {why}")?,
    }
    if !config.ignored.is_empty() {
        writeln!(
            out,
            "warning: without effect: {}",
            config.ignored.join(", ")
        )?;
    }
    let warnings = preflight::warnings(config)
        .into_iter()
        .chain(shortage)
        .chain(unkept)
        .chain(unused)
        .chain(found.warning);
    for warning in warnings.chain(l2.into_iter().flat_map(|l2| l2.warnings())) {
        writeln!(out, "warning: {warning}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Stores and loads one object, with the tier's limits of time.
fn try_out(adapter: &AdapterConfig) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let probed = runtime.block_on(async {
        let adapter = kvtier_config::adapters::registry().open(adapter)?;
        let probed = kvtier_l2::probe(&*adapter).await;
        adapter.close().await;
        probed
    })?;
    let millis = probed.time.as_secs_f64() * 1e3;
    Ok(if let Some(error) = probed.missing_peers {
        format!("no peer is connected yet: {error}")
    } else if probed.was_written {
        format!("stored, found, loaded and deleted an object in {millis:.1} ms")
    } else {
        format!("answered in {millis:.1} ms; nothing was written, as it is read-only")
    })
}

/// What `--check-config` has bound.
fn ports(config: &ServerConfig) -> Vec<String> {
    let requests = match config.ipc_path() {
        None => Some(config.port),
        Some(_) => None,
    };
    let (http, prometheus) = (Some(config.http_port), config.prometheus_port);
    let ports = [requests, http, prometheus, config.peer_port];
    let chosen = ports.into_iter().flatten().filter(|port| *port != 0);
    chosen.map(|port| port.to_string()).collect()
}
