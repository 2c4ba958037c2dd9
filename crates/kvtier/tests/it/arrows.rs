//! Arrows between crates and files only point down.
//!
//! A crate may use those above it in ARCHITECTURE's table, and no others. Inside a crate, files may use each other in a
//! circle only in pairs; a module and what is in its folder are one family, so what a child takes from its own ancestors
//! is no arrow.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Names of a module: its path below the crate's root.
type Module = Vec<String>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn crates() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("crates")).unwrap();
    let mut crates: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    crates.sort();
    crates
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

#[test]
fn crates_depend_only_on_those_above_them_in_architecture() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `kvtier"));
    let order: Vec<_> = rows
        .map(|row| format!("kvtier{}", row.split('`').next().unwrap()))
        .collect();
    for path in crates() {
        let own = name(&path);
        let place = order.iter().position(|known| *known == own);
        let place = place.unwrap_or_else(|| panic!("{own} is not in ARCHITECTURE's table"));
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or("");
        let section = section.split("\n[").next().unwrap();
        let used = section.lines().filter(|line| line.starts_with("kvtier-"));
        for used in used.map(|line| line.split(['.', ' ']).next().unwrap()) {
            assert!(
                order[..place].iter().any(|above| above == used),
                "{own} uses {used}, which is not above it in ARCHITECTURE's table"
            );
        }
    }
}

#[test]
fn circles_between_files_are_pairs_at_most() {
    let mut circles = Vec::new();
    for path in crates() {
        let files = Files::read(&path.join("src"));
        for circle in files.circles().into_iter().filter(|circle| circle.len() > 2) {
            let names: Vec<_> = circle.iter().map(|module| module.join("::")).collect();
            circles.push(format!("{}: {}", name(&path), names.join(", ")));
        }
    }
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}

/// The modules of a crate that have a file, with what they use.
struct Files {
    uses: BTreeMap<Module, Vec<Module>>,
}

impl Files {
    fn read(source: &Path) -> Self {
        let mut uses = BTreeMap::new();
        let mut folders = vec![(source.to_owned(), Module::new())];
        while let Some((folder, module)) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
                let mut own = module.clone();
                if !["lib", "main", "mod"].contains(&stem.as_str()) {
                    own.push(stem.clone());
                }
                if stem.contains("test") {
                    continue;
                }
                if path.is_dir() {
                    folders.push((path, own));
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = without_tests_and_comments(&fs::read_to_string(&path).unwrap());
                    uses.insert(own.clone(), paths(&text, &own));
                }
            }
        }
        Self { uses }
    }

    /// The file that a path leads to, by way of what modules import.
    fn file_of(&self, path: &[String]) -> Option<Module> {
        let mut path = path.to_vec();
        for _ in 0..8 {
            let longest = (0..=path.len()).rev().map(|len| &path[..len]);
            let module = longest.into_iter().find(|module| self.uses.contains_key(*module))?;
            let Some(item) = path.get(module.len()) else {
                return Some(module.to_vec());
            };
            let imported = self.uses[module].iter().find(|used| {
                used.last() == Some(item) && used.len() > module.len() && used.starts_with(module)
            });
            match imported {
                Some(imported) if *imported != path => path = imported.clone(),
                _ => return Some(module.to_vec()),
            }
        }
        None
    }

    fn arrows(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let to = |from: &Module, uses: &Vec<Module>| {
            let targets = uses.iter().filter_map(|path| self.file_of(path));
            targets
                // A family: an ancestor of its own, or a child.
                .filter(|to| !from.starts_with(to) && !to.starts_with(from))
                .collect()
        };
        self.uses
            .iter()
            .map(|(from, uses)| (from, to(from, uses)))
            .collect()
    }

    /// Sets of files that reach each other.
    fn circles(&self) -> BTreeSet<BTreeSet<Module>> {
        let arrows = self.arrows();
        let reach = |from: &Module| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for to in &arrows[&module] {
                    if seen.insert(to.clone()) {
                        next.push(to.clone());
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<_, _> = arrows.keys().map(|from| (*from, reach(from))).collect();
        let circle = |from: &&Module| {
            let back = reached[*from].iter().filter(|to| reached[to].contains(*from));
            back.cloned().collect::<BTreeSet<_>>()
        };
        let circles = reached.keys().map(circle);
        circles.filter(|circle| circle.len() > 1).collect()
    }
}

fn without_tests_and_comments(text: &str) -> String {
    let mut lines = Vec::new();
    let mut lines_left = text.lines().peekable();
    while let Some(line) = lines_left.next() {
        if line.trim() == "#[cfg(test)]" {
            // An item of tests, up to its closing brace or its semicolon.
            let indent = line.len() - line.trim_start().len();
            for skipped in lines_left.by_ref() {
                let ends = skipped.len() - skipped.trim_start().len() == indent
                    && (skipped.trim() == "}" || skipped.ends_with(';'));
                if ends {
                    break;
                }
            }
            continue;
        }
        lines.push(line.split("//").next().unwrap_or(""));
    }
    lines.join("\n")
}

/// Paths that begin with `crate`, `super` or `self`, or that import from a child, from the crate's root on.
fn paths(text: &str, own: &[String]) -> Vec<Module> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("use ").filter(|_| true) {
        let before = rest[..at].chars().next_back();
        rest = &rest[at + 4..];
        if before.is_none_or(|before| before.is_whitespace()) {
            let tree: String = rest.split(';').next().unwrap().split_whitespace().collect();
            let mut paths = Vec::new();
            expand(&tree, "", &mut paths);
            found.extend(paths.iter().filter_map(|path| absolute(path, own, true)));
        }
    }
    for word in ["crate::", "super::"] {
        for (at, _) in text.match_indices(word) {
            let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            if text[..at].chars().next_back().is_some_and(is_path) {
                continue;
            }
            let path: String = text[at..].chars().take_while(|c| is_path(*c)).collect();
            found.extend(absolute(&path, own, false));
        }
    }
    found
}

/// Writes out the braces of an import.
fn expand(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let Some(open) = tree.find('{') else {
        let path = format!("{prefix}{tree}");
        return paths.push(path.split("as").next().unwrap_or("").to_owned() + "");
    };
    let prefix = format!("{prefix}{}", &tree[..open]);
    let inner = tree[open + 1..].strip_suffix('}').unwrap_or(&tree[open + 1..]);
    let (mut depth, mut start) = (0, 0);
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b',' if depth == 0 => {
                expand(&inner[start..at], &prefix, paths);
                start = at + 1;
            }
            _ => {}
        }
    }
    if start < inner.len() {
        expand(&inner[start..], &prefix, paths);
    }
}

/// A path from the crate's root on; `None` for one of another crate.
fn absolute(path: &str, own: &[String], is_import: bool) -> Option<Module> {
    let mut parts = path.split("::").filter(|part| !part.is_empty() && *part != "*");
    let mut module = own.to_vec();
    let mut first = parts.next()?;
    match first {
        "crate" => module.clear(),
        "self" => {}
        "super" => {
            module.pop();
            let mut rest = parts.clone();
            while rest.next() == Some("super") {
                module.pop();
                parts.next();
            }
        }
        // Of a child, where there is one; else nothing is found there.
        _ if is_import => {
            module.push(first.to_owned());
        }
        _ => return None,
    }
    first = "";
    debug_assert!(first.is_empty());
    module.extend(parts.filter(|part| *part != "self").map(str::to_owned));
    Some(module)
}
