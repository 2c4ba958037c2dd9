//! How GPUs are found and used.

use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, ValueEnum};
use kvtier_common::error::{Error, Result};
use kvtier_device::cuda::{CudaOptions, Executor, GpuOptions};
use kvtier_l2::config::{ALLOWED_PATH, is_path};

use super::values::seconds;

/// Location of the CUDA driver's library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaDriver {
    /// The library is where the system finds it, if it does.
    Auto,
    /// GPUs are not used.
    Off,
    /// The library is this file.
    Path(PathBuf),
}

/// `--l1-numa-nodes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NumaNodes {
    /// NUMA nodes that the GPUs are on, as far as the system tells.
    Auto,
    /// Whatever the system does.
    Off,
    /// Exactly these nodes.
    List(Vec<u32>),
}

/// `--gpu-executor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ExecutorName {
    Auto,
    Batch,
    Kernel,
    Staged,
    Plain,
}

/// When a transfer of a worker on a GPU is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuReply {
    /// When its bytes are in place.
    Done,
    /// When it is with the GPU, with an event that is complete when they are.
    Event,
}

/// The flags.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct GpuSettings {
    /// Library of the CUDA driver: auto is libcuda.so.1 if it is found (else workers on GPUs are refused), off uses no
    /// GPU, a path must exist
    #[arg(long, value_name = "auto|off|PATH", default_value = "auto", value_parser = parse_driver, help_heading = "GPU")]
    pub cuda_driver: CudaDriver,
    /// How copies between GPUs and L1 are made; auto is the fastest for the length of their runs (docs/gpu.md)
    #[arg(long, value_enum, default_value = "auto", help_heading = "GPU")]
    pub(super) gpu_executor: ExecutorName,
    /// When transfers of workers on a GPU are answered: done, when their bytes are in place; event, at once with an
    /// event to query, as LMCache does, so that later failures are only logged
    #[arg(long, value_enum, default_value = "done", help_heading = "GPU")]
    pub gpu_reply: GpuReply,
    /// NUMA nodes of L1's memory: auto, those of the GPUs, each with a part of L1; off, the nodes of first touch; or a
    /// list such as 0,1, used in turn
    #[arg(long, value_name = "auto|off|LIST", default_value = "auto", value_parser = parse_nodes, help_heading = "GPU")]
    pub l1_numa_nodes: NumaNodes,
    /// Seconds that an engine's event may take to complete, 0.1 or more; then its store or retrieve fails
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds(0.1), help_heading = "GPU")]
    pub(super) gpu_event_timeout_seconds: Duration,
}

fn parse_driver(text: &str) -> Result<CudaDriver> {
    match text {
        "auto" => Ok(CudaDriver::Auto),
        "off" => Ok(CudaDriver::Off),
        path if path.contains('/') && is_path(path) => Ok(CudaDriver::Path(path.into())),
        _ => Err(Error::refused(format!(
            "give auto, off, or {ALLOWED_PATH}, with a / in it"
        ))),
    }
}

fn parse_nodes(text: &str) -> Result<NumaNodes> {
    match text {
        "auto" => Ok(NumaNodes::Auto),
        "off" => Ok(NumaNodes::Off),
        list => {
            let nodes = list.split(',').map(|node| node.trim().parse().ok());
            nodes
                .collect::<Option<_>>()
                .map(NumaNodes::List)
                .ok_or_else(|| {
                    Error::refused("give auto, off, or numbers of nodes with commas between them")
                })
        }
    }
}

/// Returns the names of given flags that mean nothing without a GPU.
pub(super) fn given(matches: &ArgMatches) -> Vec<String> {
    let names = matches.ids().map(|id| id.as_str());
    let given = names.filter(|name| {
        name.starts_with("gpu_") && matches.value_source(name) == Some(ValueSource::CommandLine)
    });
    let mut flags: Vec<_> = given
        .map(|name| format!("--{}", name.replace('_', "-")))
        .collect();
    flags.sort();
    flags
}

impl GpuSettings {
    /// What the device crate wants to know; `None` when GPUs are not used.
    pub(super) fn options(&self) -> Option<CudaOptions> {
        let executor = match self.gpu_executor {
            ExecutorName::Auto => None,
            ExecutorName::Batch => Some(Executor::Batch),
            ExecutorName::Kernel => Some(Executor::Kernel),
            ExecutorName::Staged => Some(Executor::Staged),
            ExecutorName::Plain => Some(Executor::Plain),
        };
        let library = match &self.cuda_driver {
            CudaDriver::Auto => None,
            CudaDriver::Off => return None,
            CudaDriver::Path(path) => Some(path.clone()),
        };
        Some(CudaOptions {
            library,
            gpu: GpuOptions {
                executor,
                event_timeout: self.gpu_event_timeout_seconds,
                ..GpuOptions::default()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::NumaNodes;
    use crate::ServerConfig;

    #[test]
    fn a_driver_is_found_given_or_off() {
        let cuda = |flags: &[&str]| ServerConfig::from_flags(flags).map(|config| config.cuda);
        assert_eq!(cuda(&[]).unwrap().unwrap().library, None);
        assert!(cuda(&["--cuda-driver", "off"]).unwrap().is_none());
        let given = cuda(&["--cuda-driver", "/opt/libcuda.so"])
            .unwrap()
            .unwrap();
        assert_eq!(given.library.unwrap().to_str(), Some("/opt/libcuda.so"));
        let error = cuda(&["--cuda-driver", "of"]).unwrap_err().to_string();
        assert!(
            error.contains("--cuda-driver") && error.contains("give auto, off"),
            "{error}"
        );
        let nodes = |text| {
            let flags = ["--l1-numa-nodes", text];
            ServerConfig::from_flags(&flags).map(|config| config.args.gpu.l1_numa_nodes)
        };
        assert_eq!(nodes("0, 1").unwrap(), NumaNodes::List(vec![0, 1]));
        assert_eq!(nodes("auto").unwrap(), NumaNodes::Auto);
        assert!(
            nodes("0,x")
                .unwrap_err()
                .to_string()
                .contains("--l1-numa-nodes")
        );
        let error = cuda(&["--gpu-event-timeout-seconds", "0"]).unwrap_err();
        assert!(error.to_string().contains("0.1"), "{error}");
    }
}
