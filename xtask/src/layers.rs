//! The layers of `crates/peerway`. Its top-level modules must not depend on each other in a cycle,
//! and a module may use only those that come after it in the list of ARCHITECTURE.md.
//!
//! A module depends on another if a path in its code begins with `crate::` and the other's name.
//! Tests, models and the simulation do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// Files and folders that only tests use.
const FOR_TESTS: [&str; 5] = ["tests.rs", "loom.rs", "simulation", "bugs.rs", "lib.rs"];

/// For each module, the modules that it uses, each with one file that does.
type Uses = BTreeMap<String, BTreeMap<String, PathBuf>>;

/// The dependencies between the top-level modules under `root`.
fn uses(root: &Path) -> anyhow::Result<Uses> {
    let mut files = Vec::new();
    list(root, &mut files)?;
    let module = |file: &Path| {
        let first = file.strip_prefix(root).ok()?.components().next()?;
        Some(first.as_os_str().to_str()?.trim_end_matches(".rs").to_owned())
    };
    let names: BTreeSet<String> = files.iter().filter_map(|file| module(file)).collect();
    let mut uses = Uses::new();
    for file in &files {
        let Some(of) = module(file) else { continue };
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        for used in paths(&text) {
            if names.contains(&used) {
                if used != of {
                    uses.entry(of.clone()).or_default().entry(used).or_insert_with(|| file.clone());
                }
            } else if used.starts_with(char::is_uppercase) {
                let file = file.display();
                bail!("{file}: name the module of `{used}`; `crate::{used}` hides a dependency");
            }
        }
    }
    Ok(uses)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if FOR_TESTS.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The names that follow `crate::` in a file, without its comments and its tests.
fn paths(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code: Vec<&str> =
        text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let mut names = Vec::new();
    for (at, found) in code.match_indices("crate::") {
        let rest = &code[at + found.len()..];
        match rest.strip_prefix('{') {
            Some(group) => names.extend(members(group)),
            None => names.push(identifier(rest)),
        }
    }
    names
}

/// The first name of each member of a group, up to its closing brace.
fn members(group: &str) -> Vec<String> {
    let (mut depth, mut starts, mut names) = (0, true, Vec::new());
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => starts = true,
            _ if starts && !letter.is_whitespace() => {
                names.push(identifier(&group[at..]));
                starts = false;
            }
            _ => {}
        }
    }
    names
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
}

/// A cycle of dependencies, as text with one file for each step, if there is one.
fn cycle(uses: &Uses) -> Option<String> {
    let (mut done, mut trail) = (BTreeSet::new(), Vec::new());
    let trail = uses.keys().find_map(|start| visit(start, uses, &mut done, &mut trail))?;
    let steps = trail.windows(2).map(|step| {
        let file = &uses[&step[0]][&step[1]];
        format!("{} uses {} in {}", step[0], step[1], file.display())
    });
    Some(steps.collect::<Vec<_>>().join("\n"))
}

fn visit(
    at: &str,
    uses: &Uses,
    done: &mut BTreeSet<String>,
    trail: &mut Vec<String>,
) -> Option<Vec<String>> {
    if let Some(start) = trail.iter().position(|name| name == at) {
        return Some(trail[start..].iter().cloned().chain([at.to_owned()]).collect());
    }
    if done.contains(at) {
        return None;
    }
    trail.push(at.to_owned());
    let used = uses.get(at).into_iter().flat_map(BTreeMap::keys);
    let found = used.into_iter().find_map(|used| visit(used, uses, done, trail));
    trail.pop();
    done.insert(at.to_owned());
    found
}

#[test]
fn the_top_level_modules_of_the_engine_have_no_cycle() {
    let uses = uses(&crate::workspace().join("crates/peerway/src")).unwrap();
    assert!(uses.len() > 10, "the search found too few modules: {uses:?}");
    if let Some(cycle) = cycle(&uses) {
        panic!("modules of crates/peerway depend on each other in a cycle:\n{cycle}");
    }
}

#[test]
fn modules_use_only_what_comes_after_them_in_the_map() {
    let uses = uses(&crate::workspace().join("crates/peerway/src")).unwrap();
    let map = fs::read_to_string(crate::workspace().join("ARCHITECTURE.md")).unwrap();
    let order = modules_in(&map);
    let place = |name: &String| {
        let place = order.iter().position(|other| other == name);
        place.unwrap_or_else(|| panic!("the layers in ARCHITECTURE.md lack `{name}`"))
    };
    for (of, used) in &uses {
        for (used, file) in used {
            let file = file.display();
            assert!(place(of) < place(used), "{of} uses {used}, which comes before it: {file}");
        }
    }
}

/// The modules in the list of ARCHITECTURE.md, in order. Each line has modules, then, after at
/// least two spaces, their purpose.
fn modules_in(map: &str) -> Vec<String> {
    let list = map.split("Inside `peerway`").nth(1).and_then(|rest| rest.split("```").nth(1));
    let lines = list.unwrap_or_default().lines().filter(|line| !line.trim().is_empty());
    let modules = lines.filter_map(|line| line.trim().split("  ").next());
    modules.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

#[test]
fn a_cycle_is_found_and_names_its_files() {
    let uses_of = |pairs: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (of, used) in pairs {
            let file = PathBuf::from(format!("{of}.rs"));
            uses.entry((*of).to_owned()).or_default().insert((*used).to_owned(), file);
        }
        uses
    };
    assert_eq!(cycle(&uses_of(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    let found = cycle(&uses_of(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap();
    assert_eq!(found, "b uses c in b.rs\nc uses b in c.rs");
}

#[test]
fn paths_are_found_in_all_forms() {
    let text = "use crate::a::B;\nuse crate::{c::{D, e::F}, g};\n// crate::h\n\
                fn f() { crate::i::j() }\n#[cfg(test)]\nmod tests { use crate::k; }\n";
    assert_eq!(paths(text), ["a", "c", "g", "i"]);
}
