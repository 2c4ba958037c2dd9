//! From flags to a checked configuration: ranges, combinations, and defaults that depend on the machine.

use std::collections::BTreeMap;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_memory::Space;
use kvtier_memory::checksum::checksum64;

use super::checks::{gib, refuse};
use super::flags::ServerArgs;
use super::http::{HttpConfig, TOKENS_VARIABLE};
use super::memory::default_l1;
use super::request::check_host;
use super::values::{EngineType, is_log_filter};
use super::{
    HostMemory, L1Origin, L2Config, QuotaSettings, ServerConfig, StateSettings, TracingConfig,
    l1_manager,
};

/// Name of the pool of a server at this address. Servers on a path may have the same port, which is none.
pub(super) fn default_pool(host: &str, port: u16) -> String {
    match host.strip_prefix("ipc://") {
        Some(path) => format!("kvtier_{:016x}", checksum64(path.as_bytes())),
        None => format!("kvtier_{port}"),
    }
}

/// Kinds of untyped bytes by model.
fn byte_pages(given: &[(String, String)]) -> Result<BTreeMap<String, String>> {
    let mut kinds = BTreeMap::new();
    for (model, kind) in given {
        if let Some(other) = kinds.insert(model.clone(), kind.clone())
            && other != *kind
        {
            let allowed = format!("{model} has {other} too; give one kind per model");
            return Err(refuse("byte-pages", format!("{model}={kind}"), &allowed));
        }
    }
    Ok(kinds)
}

/// Name of the pool, if one is wanted, and whether it was asked for.
fn shm_name(args: &ServerArgs) -> Result<(Option<String>, bool)> {
    let given = args.shm_name.clone();
    let required = given.as_ref().is_some_and(|name| !name.is_empty());
    if required && args.l1_use_hugepages {
        return Err(Error::refused(
            "--shm-name and --l1-use-hugepages exclude each other: a POSIX segment is not made of hugepages",
        ));
    }
    let is_useful = !args.l1_use_hugepages && args.supported_transfer_mode.allows_engine_driven();
    let name = match given {
        Some(name) => Some(name).filter(|name| !name.is_empty()),
        None => is_useful.then(|| default_pool(&args.host, args.port)),
    };
    if let Some(name) = &name
        && (name.len() > 200
            || name.trim_start_matches('/').contains(['/', '\0'])
            || name.trim_start_matches('/').is_empty())
    {
        return Err(refuse(
            "shm-name",
            format!("{name:?}"),
            "give at most 200 bytes without '/' or NUL",
        ));
    }
    Ok((name, required))
}

/// Checks ranges and combinations and fills in the defaults that depend on the machine.
pub(super) fn resolve(args: ServerArgs, ignored: Vec<String>) -> Result<ServerConfig> {
    let (shm_name, shm_required) = shm_name(&args)?;
    let memory = HostMemory::of_this_process();
    let shm = shm_name.as_deref().and_then(Space::of_pool);
    let l1_size_gb = match l1_manager::size_gb(&args.l1_manager)? {
        Some(_) if args.l1_size_gb.is_some() => {
            return Err(Error::refused(
                "--l1-manager and --l1-size-gb both say how large L1 is; give one of them",
            ));
        }
        size => size.or(args.l1_size_gb),
    };
    let (l1_bytes, l1_origin) = match l1_size_gb {
        Some(size) => (gib("l1-size-gb", size)?, L1Origin::Given),
        None => default_l1(&memory, shm.map(|shm| shm.size)),
    };
    // Whole pages, and never less than one chunk of the smallest model.
    let l1_bytes = l1_bytes.max(1).next_multiple_of(2 << 20);
    let l2 = L2Config::of(&args, l1_bytes)?;
    let reap = args.worker_reap_timeout_seconds;
    if args.registration_grace < reap {
        return Err(refuse(
            "worker-registration-grace-seconds",
            args.registration_grace.as_secs_f64(),
            "give at least --worker-reap-timeout-seconds",
        ));
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let workers = args.max_workers.map_or(cores.clamp(2, 4), usize::from);
    let max_message_bytes = gib("max-message-gb", args.max_message_gb)?;
    if !is_log_filter(&args.log_level) {
        return Err(refuse(
            "log-level",
            format!("{:?}", args.log_level),
            "give error, warn, info, debug, trace or off, or target=level pairs, with commas between them",
        ));
    }
    if args.engine_type == EngineType::Blend
        && !args.supported_transfer_mode.allows_lmcache_driven()
    {
        return Err(refuse(
            "supported-transfer-mode",
            "engine_driven",
            "give auto or lmcache_driven with --engine-type blend: the server writes the pages",
        ));
    }
    check_host(&args.host)?;
    let quotas = QuotaSettings::of(&args);
    let state = StateSettings::of(&args)?;
    let tracing = TracingConfig::of(&args)?;
    let http = HttpConfig {
        host: args.http_host.clone(),
        token_file: args.http_token_file.clone(),
        tokens: std::env::var_os(TOKENS_VARIABLE),
        tls_cert: args.http_tls_cert.clone(),
        tls_key: args.http_tls_key.clone(),
    };
    ServerConfig {
        instance_id: state.instance.clone(),
        transfer_workers: args.max_gpu_workers.map_or(workers, usize::from),
        control_workers: args.max_cpu_workers.map_or(workers, usize::from),
        shm_name,
        shm_required,
        separate_object_groups: !args.no_separate_object_groups,
        byte_pages: byte_pages(&args.byte_pages)?,
        worker_reap_timeout: (!reap.is_zero()).then_some(reap),
        busy_poll: Duration::from_micros(args.busy_poll_us.into()),
        l1_bytes,
        l1_origin,
        memory,
        l1_prefault: !args.no_l1_prefault,
        l2,
        state,
        quotas,
        cuda: args.gpu.options(),
        gpu_flags: Vec::new(),
        http,
        max_message_bytes,
        tracing,
        ignored,
        shown: serde_json::Value::Null,
        given: Default::default(),
        args,
    }
    .check_quotas()
}
