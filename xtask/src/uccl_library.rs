//! UCCL's interface for C++ on Peerway: builds `libuccl_p2p.so` and its headers, installs them
//! beside `libpeerway` and tests them there. Also compiles NIXL's UCCL plugin against them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::c_library::{self, Bench, Linked, Profile, STRICT, check_exports};
use crate::file_set::FileSet;
use crate::python::{PIP_INSTALL, output, step, step_with};
use crate::test::target_directory;

const SOURCES: &str = "compat/uccl/cpp";
const HEADERS: &str = "compat/uccl/include";
const EXPORTS: &str = "compat/uccl/cpp/exports.map";
const LIBRARY: &str = "libuccl_p2p.so";

const TESTS: &[&str] = &[
    "compat/uccl/tests/transfers.cpp",
    "compat/uccl/tests/handles.cpp",
    "compat/uccl/tests/failed.cpp",
];
const OF_GPUS: &str = "compat/uccl/tests/gpu.cpp";

/// Builds the library and installs it and its headers beside the libpeerway in `prefix`: all files
/// or none.
pub(crate) fn install(
    workspace: &Path,
    target: &Path,
    prefix: &Path,
    profile: Profile,
) -> anyhow::Result<()> {
    let mut files = FileSet::default();
    stage(&mut files, workspace, target, prefix, profile)?;
    files.commit()
}

/// Builds the library and adds the files for `prefix` to `files`.
pub(crate) fn stage(
    files: &mut FileSet,
    workspace: &Path,
    target: &Path,
    prefix: &Path,
    profile: Profile,
) -> anyhow::Result<()> {
    let peerway = c_library::build(target, profile)?;
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    for directory in [&include, &lib] {
        files.make_directory(directory)?;
    }
    for header in ["uccl_engine.h", "common.h"] {
        files.add_copy(&workspace.join(HEADERS).join(header), &include.join(header))?;
    }
    // Not beside cargo's libraries: cargo makes programs search there first, and libpeerway is not
    // there.
    let place = peerway.join("uccl");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {place:?}"))?;
    let made = place.join(LIBRARY);
    let sources = files_in(&workspace.join(SOURCES), "cpp")?;
    let exports = format!("-Wl,--version-script={EXPORTS}");
    let library = made.display().to_string();
    // Link by file name, because the file is not called libpeerway.so here. Its soname is.
    let linked = peerway.join("libpeerway_c.so").display().to_string();
    let [ours, uccls] = ["include", HEADERS].map(|d| format!("-I{}", workspace.join(d).display()));
    // The library finds libpeerway beside itself, wherever the two are moved.
    let names = ["-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined", "-Wl,-soname,libuccl_p2p.so"];
    let options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", &ours, &uccls];
    let sources: Vec<&str> = sources.iter().map(String::as_str).collect();
    let flags = [&STRICT[..], &options, &["-o", &library], &sources, &[&linked, &exports], &names];
    let flags = flags.concat();
    step(Path::new("g++"), workspace, &flags)?;
    files.add_copy(&made, &lib.join(LIBRARY))
}

/// Checks the symbols and runs the tests, directly and under valgrind. `fake` is the fake CUDA
/// library.
pub(crate) fn test(bench: &Bench<'_>, fake: &Path) -> anyhow::Result<()> {
    install(bench.workspace, &target_directory(), bench.prefix, Profile::Debug)?;
    check_symbols(bench)?;
    for source in TESTS {
        let program = bench.compile(source, Linked::Uccl)?;
        bench.run(&program, &[], &[])?;
        bench.run_under_valgrind(&program)?;
    }
    let program = bench.compile(OF_GPUS, Linked::Uccl)?;
    bench.run(&program, &[("PEERWAY_CUDA_SO", &fake.display().to_string())], &[])
}

/// Checks that the library exports exactly the names that UCCL's callers use.
fn check_symbols(bench: &Bench<'_>) -> anyhow::Result<()> {
    let file = bench.workspace.join(EXPORTS);
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file:?}"))?;
    let wanted: BTreeSet<&str> = exported(&text).collect();
    check_exports(&bench.prefix.join("lib").join(LIBRARY), "--dynamic", &wanted, EXPORTS)
}

/// The names in a linker's version script.
fn exported(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter_map(|line| line.trim().strip_suffix(';')).filter(|n| n.starts_with("_Z"))
}

/// Compiles NIXL's unchanged UCCL plugin and runs two agents of NIXL's wheel over it.
pub(crate) fn run_nixl(workspace: &Path, target: &Path, nixl: &Path) -> anyhow::Result<()> {
    let nixl = nixl.join("src");
    let place = target.join("nixl");
    let (prefix, plugins) = (place.join("prefix"), place.join("plugins"));
    fs::create_dir_all(&plugins).with_context(|| format!("cannot make {plugins:?}"))?;
    c_library::install(workspace, target, &prefix, Profile::Debug)?;
    install(workspace, target, &prefix, Profile::Debug)?;

    let environment = place.join("python");
    let python = environment.join("bin/python");
    step(Path::new("python3"), workspace, &["-m", "venv", &environment.display().to_string()])?;
    step(&python, workspace, &[&PIP_INSTALL[..], &["numpy"]].concat())?;
    // Without torch, which the wheel requires but these agents do not use.
    step(&python, workspace, &[&PIP_INSTALL[..], &["--no-deps", "nixl", "nixl-cu12"]].concat())?;
    let find = "import nixl_cu12, os; print(os.path.dirname(os.path.dirname(nixl_cu12.__file__)))";
    let packages = output(Command::new(&python).args(["-c", find]))?;
    let wheel = Path::new(packages.trim()).join(".nixl_cu12.mesonpy.libs");

    let mut flags = vec![format!("-I{}", prefix.join("include").display())];
    flags.extend(nixl_headers(workspace, &nixl));
    flags.extend(files_in(&nixl.join("plugins/uccl"), "cpp")?);
    let lib = prefix.join("lib").display().to_string();
    flags.extend([format!("-L{lib}"), format!("-Wl,-rpath,{lib}"), "-luccl_p2p".into()]);
    flags.extend([format!("-L{}", wheel.display()), "-lserdes".into(), "-o".into()]);
    flags.push(plugins.join("libplugin_UCCL.so").display().to_string());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    step(
        Path::new("g++"),
        workspace,
        &[&["-std=c++20", "-O2", "-fPIC", "-shared"], &flags[..]].concat(),
    )?;
    let variables = [("NIXL_PLUGIN_DIR", &*plugins.display().to_string())];
    step_with(&variables, &python, workspace, &["compat/uccl/tests/nixl/two_agents.py"])
}

/// Compiler flags that find the headers in NIXL's sources. Peerway's stand-ins precede the Abseil
/// headers.
pub(crate) fn nixl_headers(workspace: &Path, nixl: &Path) -> Vec<String> {
    let ours = workspace.join("compat/uccl/tests/nixl");
    let theirs = ["api/cpp", "utils", "core", "core/telemetry", "infra"].map(|of| nixl.join(of));
    [ours].iter().chain(&theirs).map(|directory| format!("-I{}", directory.display())).collect()
}

/// The files of a directory with this extension, sorted.
fn files_in(directory: &Path, extension: &str) -> anyhow::Result<Vec<String>> {
    let found = fs::read_dir(directory).with_context(|| format!("cannot read {directory:?}"))?;
    let found = found.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
    let fitting = found.iter().filter(|path| path.extension().is_some_and(|e| e == extension));
    let mut named: Vec<_> = fitting.map(|path| path.display().to_string()).collect();
    named.sort();
    ensure!(!named.is_empty(), "{directory:?} has no .{extension} file");
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_separated_from_the_rest_of_the_list() {
        let list = "/* _Zcomment; */\n{\nglobal:\n    _Z1av;\n    _Z2bcPv;\nlocal:\n    *;\n};\n";
        assert_eq!(exported(list).collect::<Vec<_>>(), ["_Z1av", "_Z2bcPv"]);
    }
}
