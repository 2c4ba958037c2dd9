//! `docs/l2.md` against the definitions of the keys.

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/l2.md");
const BEGIN: &str = "<!-- keys -->\n";
const END: &str = "<!-- /keys -->";

#[test]
fn key_tables_match_their_definitions() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let keys = kvtier_adapters::registry().reference_markdown();
    let right = format!("{before}{BEGIN}\n{}\n\n{END}{after}", keys.trim());
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, &right).unwrap();
    }
    assert!(
        std::fs::read_to_string(PAGE).unwrap() == right,
        "docs/l2.md is out of date; KVTIER_WRITE_DOCS=1 cargo test -p kvtier-adapters --test it"
    );
}
