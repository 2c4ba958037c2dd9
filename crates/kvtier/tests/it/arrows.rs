//! Arrows between crates and files only point down.
//!
//! A crate may use those above it in ARCHITECTURE's table, and no others. Inside a crate, files may use each other in a
//! circle only in pairs of one folder; a module and what is in its folder are one family, so what a child takes from its own ancestors
//! is no arrow.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::docs::root;

/// Names of a module: its path below the crate's root.
type Module = Vec<String>;

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
fn crates_depend_only_on_crates_above() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `kvtier"));
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
fn circles_between_files_are_pairs_in_one_folder_at_most() {
    let mut circles = Vec::new();
    // A driver is one state by nature, and the fake one is in no release.
    let shipped = crates().into_iter();
    for path in shipped.filter(|path| name(path) != "kvtier-cuda-fake") {
        let files = Files::read(&path.join("src"));
        for circle in files
            .circles()
            .into_iter()
            .filter(|circle| circle.len() > 2 || !is_in_one_folder(circle))
        {
            let names: Vec<_> = circle.iter().map(|module| module.join("::")).collect();
            circles.push(format!("{}: {}", name(&path), names.join(", ")));
        }
    }
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}

fn is_in_one_folder(circle: &BTreeSet<Module>) -> bool {
    let folders = circle.iter().map(|module| &module[..module.len() - 1]);
    folders.collect::<BTreeSet<_>>().len() == 1
}

/// The modules of a crate that have a file, with the paths they use, from the crate's root on.
struct Files {
    uses: BTreeMap<Module, Vec<Module>>,
}

impl Files {
    fn read(source: &Path) -> Self {
        let mut uses = BTreeMap::new();
        let mut folders = vec![(source.to_owned(), Module::new())];
        while let Some((folder, parent)) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let stem = path.file_stem().unwrap().to_str().unwrap();
                if stem.contains("test") {
                    continue;
                }
                let mut module = parent.clone();
                if !["lib", "main", "mod"].contains(&stem) {
                    module.push(stem.to_owned());
                }
                if path.is_dir() {
                    folders.push((path, module));
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let code = without_tests_and_comments(&fs::read_to_string(&path).unwrap());
                    let used = paths(&code, &module);
                    uses.insert(module, used);
                }
            }
        }
        Self { uses }
    }

    /// The file that a path leads to, by way of what modules import.
    fn file_of(&self, path: &[String]) -> Option<Module> {
        let mut path = path.to_vec();
        // Imports of imports end soon; a bound for those that do not.
        for _ in 0..8 {
            let len = (0..=path.len()).rev();
            let len = len
                .into_iter()
                .find(|len| self.uses.contains_key(&path[..*len]))?;
            let module = path[..len].to_vec();
            let Some(item) = path.get(len) else {
                return Some(module);
            };
            let import = self.uses[&module].iter().find(|used| {
                used.last() == Some(item) && used.len() > len + 1 && used.starts_with(&module)
            });
            match import {
                Some(import) if *import != path => path = import.clone(),
                _ => return Some(module),
            }
        }
        None
    }

    /// Returns the files that each file uses. A module and its children are one family, in which there are no arrows.
    fn arrows(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let targets = |from: &Module, used: &[Module]| {
            let targets = used.iter().filter_map(|path| self.file_of(path));
            targets
                .filter(|to| !from.starts_with(to) && !to.starts_with(from))
                .collect()
        };
        let files = self.uses.iter();
        files
            .map(|(from, used)| (from, targets(from, used)))
            .collect()
    }

    /// Sets of files that reach each other.
    fn circles(&self) -> BTreeSet<BTreeSet<Module>> {
        let arrows = self.arrows();
        let reach = |from: &Module| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for to in &arrows[&module] {
                    if reached.insert(to.clone()) {
                        next.push(to.clone());
                    }
                }
            }
            reached
        };
        let reached: BTreeMap<&Module, _> =
            arrows.keys().map(|from| (*from, reach(from))).collect();
        let circle = |from: &Module| -> BTreeSet<Module> {
            let mutual = reached[from].iter().filter(|to| reached[to].contains(from));
            mutual.cloned().collect()
        };
        let circles = reached.keys().map(|from| circle(from));
        circles.filter(|circle| circle.len() > 1).collect()
    }
}

/// Without `#[cfg(test)]` items, which end at a line of their own indentation, and without comments.
fn without_tests_and_comments(text: &str) -> String {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let (mut code, mut lines) = (String::new(), text.lines());
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let is_end = |item: &&str| {
                indent(item) == indent(line) && (item.trim() == "}" || item.ends_with(';'))
            };
            lines.by_ref().find(is_end);
            continue;
        }
        code += line.split("//").next().unwrap_or_default();
        code.push('\n');
    }
    code
}

/// What a file imports, and paths in it that begin with `crate` or `super`.
fn paths(code: &str, own: &Module) -> Vec<Module> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let begins = |at: usize| !code[..at].ends_with(is_path);
    let imports = code.match_indices("use ").filter(|(at, _)| begins(*at));
    let imports = imports.flat_map(|(at, word)| {
        let tree = code[at + word.len()..]
            .split(';')
            .next()
            .unwrap_or_default();
        let tree = tree.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut paths = Vec::new();
        expand(&tree, "", &mut paths);
        paths
    });
    let imports = imports.filter_map(|path| absolute(&path, own, true));
    let others = ["crate::", "super::"].into_iter();
    let others = others.flat_map(|word| code.match_indices(word));
    let others = others.filter(|(at, _)| begins(*at)).filter_map(|(at, _)| {
        let path: String = code[at..].chars().take_while(|c| is_path(*c)).collect();
        absolute(&path, own, false)
    });
    imports.chain(others).collect()
}

/// Adds the paths of an import, with its braces written out.
fn expand(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((before, inner)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return paths.push(format!("{prefix}{path}"));
    };
    let prefix = format!("{prefix}{before}");
    let inner = inner.trim_end().strip_suffix('}').unwrap_or(inner);
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[start..at].trim().is_empty() {
                    expand(&inner[start..at], &prefix, paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// A path from the crate's root on; `None` for one that begins with another crate's name. An import may begin with a child.
fn absolute(path: &str, own: &Module, is_import: bool) -> Option<Module> {
    let mut parts: Vec<_> = path.split("::").collect();
    parts.retain(|part| !["", "*"].contains(part));
    let mut module = own.clone();
    match *parts.first()? {
        "crate" => module.clear(),
        "self" | "super" => {}
        _ if is_import => {
            return Some(
                [
                    module,
                    parts.iter().map(|part| (*part).to_owned()).collect(),
                ]
                .concat(),
            );
        }
        _ => return None,
    }
    for part in parts {
        match part {
            "crate" | "self" => {}
            "super" => drop(module.pop()),
            part => module.push(part.to_owned()),
        }
    }
    Some(module)
}

#[test]
fn circle_is_found_through_imports_of_a_parent() {
    let file = |module: &str, code: &str| {
        let module: Module = module.split_terminator("::").map(str::to_owned).collect();
        (
            module.clone(),
            paths(&without_tests_and_comments(code), &module),
        )
    };
    let uses = [
        file("", "mod a;\nmod b;\npub use b::{B, Other as Renamed};\n"),
        file("a", "use super::B;\n"),
        file("b", "// use crate::d::D;\nfn f() { crate::c::C::new() }\n"),
        file(
            "c",
            "#[cfg(test)]\nmod tests {\n    use super::super::b::B;\n}\nuse crate::a;\n",
        ),
        file("d", "use super::{a, b::{B, Other}};\n"),
    ];
    let files = Files {
        uses: uses.into_iter().collect(),
    };
    let circle: BTreeSet<Module> = ["a", "b", "c"].map(|name| vec![name.to_owned()]).into();
    assert_eq!(files.circles(), [circle].into());
}
