//! `docs/tier-keys.md` against the definitions of the keys.

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tier-keys.md");

#[test]
fn key_tables_match_their_definitions() {
    let page = kvtier_config::adapters::registry().reference_markdown();
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(PAGE).unwrap_or_default() == page,
        "docs/tier-keys.md is out of date; KVTIER_WRITE_DOCS=1 cargo test -p kvtier-config --test it"
    );
}
