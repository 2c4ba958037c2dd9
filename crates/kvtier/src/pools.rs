//! `kvtier pools`: memory that servers have in `/dev/shm` and in hugepages, and how what no server has is freed.

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanBytes;
use kvtier_memory::{Holder, KeptFile, SHM_PREFIX};

use crate::{USAGE, out};

/// Arguments of `kvtier pools`.
#[derive(Debug, Args)]
pub struct PoolsArgs {
    #[command(subcommand)]
    command: Option<PoolsCommand>,
}

#[derive(Debug, Subcommand)]
enum PoolsCommand {
    /// Free memory that no process has
    Free(FreeArgs),
}

#[derive(Debug, Args)]
struct FreeArgs {
    /// Names as listed, with or without lmcache_l1_pool_; a pool's ledger is freed with it
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Free all that no process has
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

/// Lists or frees. Exit code 1, with one line each, for names that are not freed.
pub fn run(args: &PoolsArgs) -> anyhow::Result<ExitCode> {
    let files = KeptFile::all();
    match &args.command {
        None => {
            writeln!(out::stdout(), "{}", list(&files))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(PoolsCommand::Free(free)) => self::free(&files, free),
    }
}

fn name(file: &KeptFile) -> String {
    let name = file.path.file_name().unwrap_or_default();
    // Any local user names files there: what is written to a terminal has no control characters.
    name.to_string_lossy().escape_debug().to_string()
}

fn holder(file: &KeptFile) -> String {
    match file.holder {
        Holder::None => "nothing".to_owned(),
        Holder::Server(Some(process)) => format!("the server that is process {process}"),
        Holder::Server(None) => "a server".to_owned(),
        Holder::Clients => "processes that map it".to_owned(),
        Holder::Unknown => "unknown: it is another user's".to_owned(),
    }
}

fn list(files: &[KeptFile]) -> String {
    if files.is_empty() {
        return "no server has left anything in /dev/shm".to_owned();
    }
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(["name", "size", "user", "held by"]);
    for column in table.column_iter_mut().skip(1).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for file in files {
        let size = HumanBytes(file.bytes).to_string();
        table.add_row([name(file), size, file.user.to_string(), holder(file)]);
    }
    table.to_string()
}

fn free(files: &[KeptFile], args: &FreeArgs) -> anyhow::Result<ExitCode> {
    if args.names.is_empty() && !args.all {
        let what = "free: nothing is named; allowed: names as `kvtier pools` lists them, or --all";
        out::complain("pools", what);
        return Ok(ExitCode::from(USAGE));
    }
    let mut code = ExitCode::SUCCESS;
    let mut out = out::stdout();
    let is_named = |file: &KeptFile, wanted: &str| {
        let wanted = wanted.strip_suffix(".ledger").unwrap_or(wanted);
        let (name, pool) = (name(file), format!("{SHM_PREFIX}{wanted}"));
        let name = name.strip_suffix(".ledger").unwrap_or(&name);
        [wanted, pool.as_str()].contains(&name)
    };
    let unused = |file: &&KeptFile| file.holder == Holder::None;
    let mut wanted: Vec<&KeptFile> = Vec::new();
    if args.all {
        wanted.extend(files.iter().filter(unused));
    }
    for name in &args.names {
        let before = wanted.len();
        wanted.extend(files.iter().filter(|file| is_named(file, name)));
        if wanted.len() == before {
            out::complain("pools", format!("{name}: there is none; see kvtier pools"));
            code = ExitCode::FAILURE;
        }
    }
    let mut bytes = 0;
    for file in wanted {
        let path = file.path.to_string_lossy();
        let path = path.escape_debug();
        match file.free() {
            Ok(()) => {
                writeln!(out, "freed {path}, {}", HumanBytes(file.bytes))?;
                bytes += file.bytes;
            }
            Err(error) => {
                out::complain(
                    "pools",
                    format!("{path} stays: {error}; held by {}", holder(file)),
                );
                code = ExitCode::FAILURE;
            }
        }
    }
    writeln!(out, "{} freed", HumanBytes(bytes))?;
    Ok(code)
}
