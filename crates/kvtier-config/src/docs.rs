//! The reference page of flags and keys, made from the definitions.

use std::fmt::Write as _;

use super::command::command;

/// `docs/flags.md`: every flag and key of the file, with default, allowed values and meaning.
pub fn reference_markdown() -> String {
    let mut out = String::from(
        "# Flags and configuration keys\n\n\
         <!-- Generated from the definitions by `KVTIER_WRITE_DOCS=1 cargo test -p kvtier-config reference_page`. -->\n\n\
         Flags of `kvtier server`. The TOML file of `--config` takes the same names without the leading dashes \
         (`chunk-size = 256`; `_` works as well); the command line wins over the file. A switch is `true` or `false` \
         in the file. Names, meanings and defaults are LMCache 0.5.6's where it has the flag; the text says where a \
         default differs.\n",
    );
    let command = command();
    let mut heading = String::new();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let Some(name) = arg.get_long() else { continue };
        let group = arg.get_help_heading().unwrap_or("Other");
        if group != heading {
            heading = group.to_string();
            let _ = write!(
                out,
                "\n## {heading}\n\n| flag | default | meaning |\n| --- | --- | --- |\n"
            );
        }
        let default: Vec<_> = arg
            .get_default_values()
            .iter()
            .map(|value| value.to_string_lossy())
            .collect();
        let default = if !arg.get_action().takes_values() {
            "off".into()
        } else {
            default.join(" ")
        };
        let mut help = arg
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default()
            .replace('\n', " ");
        let values: Vec<_> = arg
            .get_possible_values()
            .iter()
            .map(|value| value.get_name().to_string())
            .collect();
        if arg.get_action().takes_values() && !values.is_empty() {
            let _ = write!(help, " ({})", values.join(", "));
        }
        let _ = writeln!(out, "| `--{name}` | {} | {} |", cell(&default), cell(&help));
    }
    let (harmless, known): (Vec<_>, Vec<_>) = super::peer::args()
        .iter()
        .filter_map(|arg| arg.get_long().map(str::to_owned))
        .partition(|name| super::peer::HARMLESS.contains(&name.as_str()));
    let list = |names: Vec<String>| {
        names
            .iter()
            .map(|name| format!("`--{name}`"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let live = super::reload::LIVE.iter().map(|name| (*name).to_owned());
    let _ = writeln!(
        out,
        "\n## Changed by a reload\n\n\
         These may change in the file while the server runs ([reload](operate.md#reload)); the others need a restart.\n\n{}\n\n\
         Of an `--l2-adapter` these keys: `{}` (not from or to 0).",
        list(live.collect()),
        super::reload::LIVE_KEYS.join("`, `")
    );
    let _ = writeln!(
        out,
        "\n## Known, without effect\n\n\
         Accepted so that command lines of LMCache work; one warning at start names the given ones.\n\n{}",
        list(known)
    );
    let _ = writeln!(
        out,
        "\nAccepted without a warning, since the server always works that way:\n\n{}",
        list(harmless)
    );
    out
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}
