//! docs/clients.md: which operations the clients of each release may ask for.

use kvtier_proto::generation::Generation;
use kvtier_proto::operation::Operation;
use std::fmt::Write;

const BEGIN: &str =
    "<!-- Generated: KVTIER_WRITE_DOCS=1 cargo test -p kvtier-proto operations_by_release -->\n";
const END: &str = "<!-- end -->\n";

/// A row per operation, a column per generation: the number on the wire, and "-" where the releases do not have it.
fn table() -> String {
    let mut table = String::from("| operation |");
    for generation in Generation::ALL {
        write!(table, " {} |", generation.releases()).unwrap();
    }
    table.push_str("\n| --- |");
    table.push_str(&" --- |".repeat(Generation::ALL.len()));
    table.push('\n');
    for operation in Operation::all() {
        write!(table, "| `{}` |", operation.name()).unwrap();
        for generation in Generation::ALL {
            let cell = match generation.spec(operation).map(|spec| spec.number) {
                None => "-".into(),
                Some(None) => "by name".into(),
                Some(Some(number)) => number.to_string(),
            };
            write!(table, " {cell} |").unwrap();
        }
        table.push('\n');
    }
    table
}

#[test]
fn operations_by_release_are_those_of_the_page() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clients.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect(BEGIN);
    let (written, after) = rest.split_once(END).expect(END);
    let wanted = format!("\n{}\n", table());
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{before}{BEGIN}{wanted}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(written, wanted, "docs/clients.md is out of date: {BEGIN}");
}
