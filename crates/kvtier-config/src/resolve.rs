//! From flags to a checked configuration: ranges, combinations, and defaults that depend on the machine.

use std::collections::BTreeMap;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_memory::Space;
use kvtier_memory::checksum::checksum64;

use super::checks::{gib, refuse, seconds};
use super::flags::ServerArgs;
use super::http::{HttpConfig, TOKENS_VARIABLE};
use super::memory::default_l1;
use super::request::check_host;
use super::values::is_log_filter;
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
fn byte_pages(given: Vec<(String, String)>) -> Result<BTreeMap<String, String>> {
    let mut kinds = BTreeMap::new();
    for (model, kind) in given {
        if let Some(other) = kinds.insert(model.clone(), kind.clone())
            && other != kind
        {
            let allowed = format!("{model} has {other} too; give one kind per model");
            return Err(refuse("byte-pages", format!("{model}={kind}"), &allowed));
        }
    }
    Ok(kinds)
}

impl ServerArgs {
    /// Name of the pool, if one is wanted, and whether it was asked for.
    fn shm_name(&self) -> Result<(Option<String>, bool)> {
        let given = self.shm_name.clone();
        let required = given.as_ref().is_some_and(|name| !name.is_empty());
        if required && self.l1_use_hugepages {
            return Err(Error::refused(
                "--shm-name and --l1-use-hugepages exclude each other: a POSIX segment is not made of hugepages",
            ));
        }
        let is_useful =
            !self.l1_use_hugepages && self.supported_transfer_mode.allows_engine_driven();
        let name = match given {
            Some(name) => Some(name).filter(|name| !name.is_empty()),
            None => is_useful.then(|| default_pool(&self.host, self.port)),
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
    pub(super) fn resolve(self, ignored: Vec<String>) -> Result<ServerConfig> {
        let (shm_name, shm_required) = self.shm_name()?;
        let memory = HostMemory::of_this_process();
        let shm = shm_name.as_deref().and_then(Space::of_pool);
        let l1_size_gb = match l1_manager::size_gb(&self.l1_manager)? {
            Some(_) if self.l1_size_gb.is_some() => {
                return Err(Error::refused(
                    "--l1-manager and --l1-size-gb both say how large L1 is; give one of them",
                ));
            }
            size => size.or(self.l1_size_gb),
        };
        let (l1_bytes, l1_origin) = match l1_size_gb {
            Some(size) => (gib("l1-size-gb", size)?, L1Origin::Given),
            None => default_l1(&memory, shm.map(|shm| shm.size)),
        };
        // Whole pages, and never less than one chunk of the smallest model.
        let l1_bytes = l1_bytes.max(1).next_multiple_of(2 << 20);
        if !self.l1_align_bytes.is_power_of_two() || !(64..=2 << 20).contains(&self.l1_align_bytes)
        {
            return Err(refuse(
                "l1-align-bytes",
                self.l1_align_bytes,
                "give a power of two from 64 to 2097152",
            ));
        }
        let l2 = L2Config::of(&self, l1_bytes)?;
        let watermark = self.eviction_trigger_watermark;
        if !(watermark > 0.0 && watermark <= 1.0) {
            return Err(refuse(
                "eviction-trigger-watermark",
                watermark,
                "give a share above 0 and at most 1",
            ));
        }
        if !(0.0..=1.0).contains(&self.eviction_ratio) {
            return Err(refuse(
                "eviction-ratio",
                self.eviction_ratio,
                "give a share from 0 to 1",
            ));
        }
        if !(0.0..=1.0).contains(&self.max_pinned_share) {
            return Err(refuse(
                "max-pinned-share",
                self.max_pinned_share,
                "give a share from 0 to 1",
            ));
        }
        let reap = self.worker_reap_timeout_seconds;
        let worker_reap_timeout = match reap {
            0.0 => None,
            reap if reap < 30.0 => {
                return Err(refuse(
                    "worker-reap-timeout-seconds",
                    reap,
                    "give 0 (never) or at least 30",
                ));
            }
            reap => Some(seconds("worker-reap-timeout-seconds", reap, 30.0)?),
        };
        let registration_grace = seconds(
            "worker-registration-grace-seconds",
            self.worker_registration_grace_seconds,
            1.0,
        )?;
        if worker_reap_timeout.is_some_and(|reap| registration_grace < reap) {
            return Err(refuse(
                "worker-registration-grace-seconds",
                self.worker_registration_grace_seconds,
                "give at least --worker-reap-timeout-seconds",
            ));
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let workers = self.max_workers.map_or(cores.clamp(2, 4), usize::from);
        let max_message_bytes = gib("max-message-gb", self.max_message_gb)?;
        if !is_log_filter(&self.log_level) {
            return Err(refuse(
                "log-level",
                format!("{:?}", self.log_level),
                "give error, warn, info, debug, trace or off, or target=level pairs, with commas between them",
            ));
        }
        check_host(&self.host)?;
        let quotas = QuotaSettings::of(&self);
        let state = StateSettings::of(&self)?;
        let tracing = TracingConfig::of(&self)?;
        let http = HttpConfig {
            host: self.http_host,
            token_file: self.http_token_file,
            tokens: std::env::var_os(TOKENS_VARIABLE),
            tls_cert: self.http_tls_cert,
            tls_key: self.http_tls_key,
        };
        ServerConfig {
            instance_id: state.instance.clone(),
            host: self.host,
            ipc_mode: self.ipc_mode,
            port: self.port,
            chunk_size: self.chunk_size,
            null_block_id: self.null_block_id,
            transfer_workers: self.max_gpu_workers.map_or(workers, usize::from),
            control_workers: self.max_cpu_workers.map_or(workers, usize::from),
            hash_algorithm: self.hash_algorithm,
            transfer_mode: self.supported_transfer_mode,
            shm_name,
            shm_required,
            separate_object_groups: !self.no_separate_object_groups,
            windowed_clients: self.windowed_clients,
            byte_pages: byte_pages(self.byte_pages)?,
            worker_reap_timeout,
            registration_grace,
            stop_timeout: seconds("stop-timeout-seconds", self.stop_timeout_seconds, 1.0)?,
            busy_poll: Duration::from_micros(self.busy_poll_us.into()),
            session_ttl: seconds("session-ttl-seconds", self.session_ttl_seconds, 1.0)?,
            l1_bytes,
            l1_origin,
            memory,
            l1_align_bytes: self.l1_align_bytes,
            l1_hugepages: self.l1_use_hugepages,
            l1_restore: self.l1_restore,
            l1_prefault: !self.no_l1_prefault,
            write_ttl: seconds("l1-write-ttl-seconds", self.l1_write_ttl_seconds, 1.0)?,
            read_ttl: seconds("l1-read-ttl-seconds", self.l1_read_ttl_seconds, 1.0)?,
            l2,
            eviction_policy: self.eviction_policy,
            eviction_trigger_watermark: watermark,
            eviction_ratio: self.eviction_ratio,
            max_pinned_share: self.max_pinned_share,
            state,
            quotas,
            tenants: self.tenants,
            cuda: self.gpu.options()?,
            gpu_flags: Vec::new(),
            gpu_reply: self.gpu.gpu_reply.into(),
            l1_numa_nodes: self.gpu.l1_numa_nodes,
            http,
            http_port: self.http_port,
            prometheus_port: self.prometheus_port,
            max_message_bytes,
            tracing,
            log_level: self.log_level,
            log_format: self.log_format,
            ignored,
            shown: serde_json::Value::Null,
            given: Default::default(),
        }
        .check_quotas()
    }
}
