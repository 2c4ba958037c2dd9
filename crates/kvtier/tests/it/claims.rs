//! `docs/claims.md` is made from the comments of tests that name the heading which they prove.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use crate::docs::{book, page, root};

const GENERATED: &str =
    "<!-- Generated: KVTIER_WRITE_DOCS=1 cargo test -p kvtier --test it claims -->";
/// The heading whose table has a claim per row.
const FEATURES: &str = "What works";

/// Names of tests by the file that has them, below the root of the repository.
type Tests = BTreeMap<String, BTreeSet<String>>;

/// A heading of a page, or a row of [`FEATURES`].
struct Claim {
    anchor: String,
    title: String,
    is_row: bool,
}

/// Tests by what they prove: `PAGE.md#anchor`.
fn proofs() -> BTreeMap<String, Tests> {
    let mut proofs = BTreeMap::new();
    for folder in ["crates", "bindings", "tests"] {
        collect_folder(&root().join(folder), &mut proofs);
    }
    proofs
}

fn collect_folder(folder: &Path, proofs: &mut BTreeMap<String, Tests>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            collect_folder(&path, proofs);
        } else if name.ends_with(".rs") {
            collect_file(&path, "// proves: docs/", proofs);
        } else if name.ends_with(".py") {
            collect_file(&path, "# proves: docs/", proofs);
        }
    }
}

fn collect_file(path: &Path, marker: &str, proofs: &mut BTreeMap<String, Tests>) {
    let text = std::fs::read_to_string(path).unwrap();
    let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let Some(claim) = line.strip_prefix(marker) else {
            continue;
        };
        let test = (lines.clone())
            .find_map(test_name)
            .unwrap_or_else(|| panic!("{file}: no test is below {line:?}"));
        let tests = proofs.entry(claim.to_owned()).or_default();
        tests.entry(file.to_owned()).or_default().insert(test);
    }
}

/// Name of the function that a line defines.
fn test_name(line: &str) -> Option<String> {
    let line = line.trim_start_matches("pub ").trim_start_matches("async ");
    let rest = line.strip_prefix("fn ").or(line.strip_prefix("def "))?;
    Some(rest.split(['(', '<']).next().unwrap().to_owned())
}

/// Claims of a page, in its order.
fn claims(page: &str) -> Vec<Claim> {
    let (mut claims, mut seen) = (Vec::new(), BTreeMap::<_, u32>::new());
    let (mut in_block, mut in_features) = (false, false);
    for line in page.lines() {
        in_block ^= line.starts_with("```");
        let title = line.trim_start_matches('#').trim();
        let is_heading = line.starts_with('#') && !in_block;
        if is_heading {
            in_features = title == FEATURES;
        }
        let cell = line.strip_prefix("| ").filter(|_| in_features);
        let cell = cell.map(|row| row.split(" | ").next().unwrap());
        let cell = cell.filter(|cell| *cell != "what" && *cell != "---");
        let Some(title) = cell.or(is_heading.then_some(title)) else {
            continue;
        };
        let earlier = seen.entry(slug(title)).or_default();
        let anchor = match *earlier {
            0 => slug(title),
            number => format!("{}-{number}", slug(title)),
        };
        *earlier += 1;
        claims.push(Claim {
            anchor,
            title: title.replace('`', ""),
            is_row: !is_heading,
        });
    }
    claims
}

/// Anchor of a heading, as GitHub and mdbook make it.
fn slug(title: &str) -> String {
    let kept = title.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then(|| c.to_ascii_lowercase()),
    });
    kept.collect()
}

/// The page, and what is proven that no page claims.
fn claims_page(mut proofs: BTreeMap<String, Tests>) -> (String, Vec<String>) {
    let mut text = format!(
        "# Claims and their tests\n\n{GENERATED}\n\n\
         The tests of a row fail when its claim is no longer true.\n\n\
         | claim | tests |\n| --- | --- |\n"
    );
    let mut names = book();
    names.sort_unstable();
    for name in names {
        let claims = claims(&page(&format!("docs/{name}")));
        for claim in &claims {
            let Some(tests) = proofs.remove(&format!("{name}#{}", claim.anchor)) else {
                continue;
            };
            // Rows of a table cannot be linked to.
            let target = if claim.is_row {
                slug(FEATURES)
            } else {
                claim.anchor.clone()
            };
            let title = match &*claims[0].title {
                page if page == claim.title => page.to_owned(),
                page => format!("{page}: {}", claim.title),
            };
            writeln!(text, "| [{title}]({name}#{target}) | {} |", cell(&tests)).unwrap();
        }
    }
    (text, proofs.into_keys().collect())
}

/// Files with their tests.
fn cell(tests: &Tests) -> String {
    let files = tests.iter().map(|(file, tests)| {
        let name = file.rsplit('/').next().unwrap();
        let tests: Vec<_> = tests.iter().map(|test| format!("`{test}`")).collect();
        format!("[{name}](../{file}) {}", tests.join(", "))
    });
    files.collect::<Vec<_>>().join("; ")
}

#[test]
fn claims_page_has_what_tests_prove() {
    let (text, unknown) = claims_page(proofs());
    assert!(
        unknown.is_empty(),
        "no page has these headings: {unknown:#?}"
    );
    let path = root().join("docs/claims.md");
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(path).unwrap(),
        text,
        "docs/claims.md is out of date: {GENERATED}"
    );
}

#[test]
fn features_have_tests() {
    let (proofs, claims) = (proofs(), claims(&page("docs/compare.md")));
    let features: Vec<_> = claims.iter().filter(|claim| claim.is_row).collect();
    assert!(features.len() > 20, "{} features", features.len());
    for Claim { anchor, title, .. } in features {
        assert!(
            proofs.contains_key(&format!("compare.md#{anchor}")),
            "no test proves {title:?} of docs/compare.md"
        );
    }
}
