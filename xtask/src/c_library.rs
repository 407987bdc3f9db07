//! The library for C: installation under a prefix, and tests from there.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::file_set::FileSet;
use crate::python::{output, step, step_with};
use crate::setup::{self, Tool};
use crate::test::{cargo, debug_build};
use crate::wheels::{self, Wheels};
use crate::{c_header, kernels, steps, uccl_library};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const HEADERS: &[&str] = &["peerway.h", "peerway_abi.h", "peerway_device.cuh"];

/// The system libraries that Rust's standard library needs, from `--print native-static-libs`.
const SYSTEM: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

const TOOLS: &[Tool] = &[
    Tool { program: "gcc", package: "gcc", why: "examples and tests in C" },
    Tool { program: "g++", package: "g++", why: "examples and tests in C++" },
    Tool { program: "valgrind", package: "valgrind", why: "memory errors of C programs" },
    Tool { program: "pkg-config", package: "pkgconf", why: "how C programs find the library" },
    Tool { program: "objcopy", package: "binutils", why: "the symbols of the library" },
];

/// The build profile of the library.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Profile {
    Debug,
    Release,
}

impl Profile {
    fn directory(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds the library and installs it, its headers and its pkg-config file under `prefix`: all
/// files or none.
pub(crate) fn install(
    workspace: &Path,
    target: &Path,
    prefix: &Path,
    profile: Profile,
) -> anyhow::Result<()> {
    let mut files = FileSet::default();
    stage(&mut files, workspace, target, prefix, profile)?;
    files.commit()?;
    println!("installed libpeerway {VERSION} ({}) in {}", profile.directory(), prefix.display());
    Ok(())
}

/// Builds the library and adds the files for `prefix` to `files`.
pub(crate) fn stage(
    files: &mut FileSet,
    workspace: &Path,
    target: &Path,
    prefix: &Path,
    profile: Profile,
) -> anyhow::Result<()> {
    let built = build(target, profile)?;
    let archive = built.join("libpeerway.a");
    make_archive(&built.join("libpeerway_c.a"), &archive)?;
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let pkgconfig = lib.join("pkgconfig");
    for directory in [&include, &pkgconfig] {
        files.make_directory(directory)?;
    }
    for header in HEADERS {
        files.add_copy(&workspace.join("include").join(header), &include.join(header))?;
    }
    files.add_copy(&archive, &lib.join("libpeerway.a"))?;
    let [whole, major] = shared_names();
    files.add_copy(&built.join("libpeerway_c.so"), &lib.join(&whole))?;
    files.add(&lib.join(&major), |new| symlink(&whole, new))?;
    files.add(&lib.join("libpeerway.so"), |new| symlink(&major, new))?;
    files.add(&pkgconfig.join("peerway.pc"), |new| fs::write(new, pkg_config()))
}

/// Builds the library and returns its directory.
pub(crate) fn build(target: &Path, profile: Profile) -> anyhow::Result<PathBuf> {
    match profile {
        Profile::Debug => debug_build()?,
        Profile::Release => cargo(&["build", "--release", "--package", "peerway-c"], &[])?,
    }
    Ok(target.join(profile.directory()))
}

/// The file name of the shared library and its soname, which the build script of peerway-c sets.
fn shared_names() -> [String; 2] {
    let major = VERSION.split('.').next().unwrap_or(VERSION);
    [format!("libpeerway.so.{VERSION}"), format!("libpeerway.so.{major}")]
}

/// The pkg-config file. It derives the prefix from its own location, so the prefix can be moved.
fn pkg_config() -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\n\
         Name: peerway\n\
         Description: Bytes between the memories of two processes, by one-sided reads and writes\n\
         Version: {VERSION}\n\
         Libs: -L${{libdir}} -lpeerway\n\
         Libs.private: {SYSTEM}\n\
         Cflags: -I${{includedir}}\n"
    )
}

pub(crate) fn put(from: &Path, to: &Path) -> anyhow::Result<()> {
    // Remove the file instead of overwriting it, because a running program may have it mapped.
    let _ = fs::remove_file(to);
    fs::copy(from, to).with_context(|| format!("cannot copy {from:?} to {to:?}"))?;
    Ok(())
}

/// Creates an archive of one object that exports only its own calls. Two libraries in Rust, or
/// different versions of their dependencies, can then be linked into one program.
fn make_archive(from: &Path, to: &Path) -> anyhow::Result<()> {
    let whole = to.with_extension("o").display().to_string();
    let (from, to) = (from.display().to_string(), to.display().to_string());
    let _ = fs::remove_file(&to);
    output(Command::new("ld").args(["-r", "--whole-archive", "-o", &whole, &from]))?;
    // Rust's standard library contains intermediate code, which is useless after linking.
    let intermediate = ["--remove-section=.llvmbc", "--remove-section=.llvmcmd"];
    let calls = ["--wildcard", "--keep-global-symbol=peerway_*"];
    output(Command::new("objcopy").args(intermediate).args(calls).arg(&whole))?;
    output(Command::new("ar").args(["rcs", &to, &whole]))?;
    fs::remove_file(&whole).with_context(|| format!("cannot remove {whole:?}"))
}

/// The part `c`: header, symbols, examples and tests. Each program runs directly and under
/// valgrind. `fake` is the fake CUDA library.
pub(crate) fn test(workspace: &Path, target: &Path, fake: &Path) -> anyhow::Result<()> {
    TOOLS.iter().try_for_each(setup::have)?;
    c_header::run(workspace, true)?;
    let place = target.join("c");
    if place.exists() {
        fs::remove_dir_all(&place).with_context(|| format!("cannot remove {place:?}"))?;
    }
    let prefix = place.join("prefix");
    install(workspace, target, &prefix, Profile::Debug)?;
    check_symbols(workspace, &prefix)?;
    let bench = Bench { workspace, place: &place, prefix: &prefix };
    for source in SOURCES {
        let program = bench.compile(source, Linked::Shared)?;
        bench.run(&program, &[], &[])?;
        bench.run_under_valgrind(&program)?;
    }
    let program = bench.compile(SOURCES[0], Linked::Static)?;
    bench.run(&program, &[], &[])?;
    let program = bench.compile(UNLOADS, Linked::Not)?;
    bench.run(
        &program,
        &[],
        &[&prefix.join("lib").join(&shared_names()[1]).display().to_string()],
    )?;
    let program = bench.compile(OF_GPUS, Linked::Shared)?;
    bench.run(&program, &[("PEERWAY_CUDA_SO", &fake.display().to_string())], &[])?;
    uccl_library::test(&bench, fake)?;
    let nvcc = Wheels::have(workspace, target, &wheels::CUDA_13)?.nvcc();
    bench.compile_for_gpus(&nvcc)
}

const SOURCES: &[&str] = &[
    "examples/c/transfer.c",
    "examples/c/layers.cpp",
    "crates/peerway-c/tests/bad_input.c",
    "crates/peerway-c/tests/threads.c",
    "crates/peerway-c/tests/lost.c",
    "crates/peerway-c/tests/driven.cpp",
];
/// Loads the library itself and leaves endpoints open.
const UNLOADS: &str = "crates/peerway-c/tests/unload.c";
/// Not under valgrind: the memory of fake GPUs is not accessible to the process.
const OF_GPUS: &str = "crates/peerway-c/tests/gpu.c";
const CUDA_EXAMPLE: &str = "examples/cuda/driven.cu";
/// Suppressions for valgrind reports that are not errors.
const SUPPRESSIONS: &str = "crates/peerway-c/tests/valgrind.supp";
pub(crate) const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-g"];

/// Checks that both libraries export exactly the calls of the header.
fn check_symbols(workspace: &Path, prefix: &Path) -> anyhow::Result<()> {
    let file = workspace.join(c_header::FILE);
    let header = fs::read_to_string(&file).with_context(|| format!("cannot read {file:?}"))?;
    let declared: BTreeSet<&str> = declared(&header).collect();
    for (name, which) in [("libpeerway.so", "--dynamic"), ("libpeerway.a", "--extern-only")] {
        check_exports(&prefix.join("lib").join(name), which, &declared, "its header")?;
    }
    Ok(())
}

/// Checks that a library exports exactly the names of a list. `which` selects the symbols that
/// `nm` prints.
pub(crate) fn check_exports(
    library: &Path,
    which: &str,
    wanted: &BTreeSet<&str>,
    list: &str,
) -> anyhow::Result<()> {
    let name = library.file_name().unwrap_or_default().display();
    let listed = output(Command::new("nm").args([which, "--defined-only"]).arg(library))?;
    let shown: BTreeSet<&str> = listed.lines().filter_map(|l| l.split(' ').nth(2)).collect();
    let more: Vec<_> = shown.difference(wanted).collect();
    ensure!(more.is_empty(), "{name} exports {more:?}, which {list} does not have");
    let less: Vec<_> = wanted.difference(&shown).collect();
    ensure!(less.is_empty(), "{name} does not export {less:?}, which {list} has");
    println!("{name} exports the {} calls of {list} and nothing else", shown.len());
    Ok(())
}

/// The names of the functions that a header declares. Declarations start in the first column,
/// unlike comments and members.
fn declared(header: &str) -> impl Iterator<Item = &str> {
    let lines = header.lines().filter(|line| !line.starts_with("//") && !line.starts_with(' '));
    lines.filter_map(|line| {
        let before = line.split_once('(')?.0;
        let name = before.rsplit([' ', '*']).next()?;
        name.starts_with("peerway_").then_some(name)
    })
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Linked {
    Shared,
    /// Also against the library with UCCL's interface.
    Uccl,
    Static,
    /// Not at all: the program loads the library at run time.
    Not,
}

/// The place where programs are compiled and run.
pub(crate) struct Bench<'a> {
    pub(crate) workspace: &'a Path,
    pub(crate) place: &'a Path,
    pub(crate) prefix: &'a Path,
}

impl Bench<'_> {
    pub(crate) fn compile(&self, source: &str, linked: Linked) -> anyhow::Result<PathBuf> {
        let (compiler, standard) = match source.ends_with(".c") {
            true => ("gcc", "-std=c11"),
            false => ("g++", "-std=c++17"),
        };
        let name = Path::new(source).file_stem().unwrap_or_default().to_string_lossy();
        let program = self.place.join(format!("{name}-{linked:?}").to_lowercase());
        let shown = program.display().to_string();
        let flags = self.pkg_config(linked)?;
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let rpath = format!("-Wl,-rpath,{}", self.prefix.join("lib").display());
        let arguments = [standard, "-pthread", source, "-o", &shown, &rpath];
        step(Path::new(compiler), self.workspace, &[&STRICT[..], &arguments, &flags].concat())?;
        Ok(program)
    }

    /// The flags from pkg-config, as users get them.
    fn pkg_config(&self, linked: Linked) -> anyhow::Result<String> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        command.args(match linked {
            Linked::Shared | Linked::Uccl => &["--cflags", "--libs"][..],
            Linked::Static => &["--cflags", "--libs", "--static"],
            Linked::Not => &["--cflags"],
        });
        let flags = output(command.arg("peerway"))?;
        // pkg-config cannot select between two libraries with one name.
        let archive = self.prefix.join("lib/libpeerway.a").display().to_string();
        Ok(match linked {
            Linked::Shared | Linked::Not => flags,
            Linked::Uccl => format!("{flags} -luccl_p2p"),
            Linked::Static => flags.replace("-lpeerway", &archive),
        })
    }

    pub(crate) fn run(
        &self,
        program: &Path,
        variables: &[(&str, &str)],
        arguments: &[&str],
    ) -> anyhow::Result<()> {
        step_with(variables, program, self.workspace, arguments)
    }

    pub(crate) fn run_under_valgrind(&self, program: &Path) -> anyhow::Result<()> {
        let log = program.with_extension("valgrind");
        let shown = program.display().to_string();
        println!("$ valgrind {shown}");
        let mut command = Command::new("valgrind");
        command
            .args(["--quiet", "--error-exitcode=99", "--trace-children=yes"])
            // A pointer into the middle of a block, as hash tables have, is not a leak.
            .args(["--leak-check=full", "--show-leak-kinds=definite,indirect"])
            .arg("--errors-for-leak-kinds=definite,indirect")
            // Only one thread runs at a time. Spinning waiters must not starve the threads they
            // wait for.
            .arg("--fair-sched=yes")
            .arg(format!("--suppressions={SUPPRESSIONS}"))
            .arg(format!("--log-file={}.%p", log.display()))
            .arg(&shown)
            .current_dir(self.workspace);
        let Err(error) = steps::run(&mut command, &format!("valgrind {shown}")) else {
            return Ok(());
        };
        let logs = self.logs(&log)?;
        for line in &logs {
            println!("{line}");
        }
        match logs.first() {
            Some(line) => Err(error.context(format!("valgrind reports: {line}"))),
            None => Err(error),
        }
    }

    /// The lines of valgrind's logs for all processes.
    fn logs(&self, log: &Path) -> anyhow::Result<Vec<String>> {
        let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut lines = Vec::new();
        for file in fs::read_dir(self.place)? {
            let file = file?.path();
            if file.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&name)) {
                lines.extend(fs::read_to_string(&file)?.lines().map(str::to_owned));
            }
        }
        Ok(lines)
    }

    /// Compiles only an object, because running it needs a GPU.
    fn compile_for_gpus(&self, nvcc: &Path) -> anyhow::Result<()> {
        let object = self.place.join("driven.o").display().to_string();
        let include = self.prefix.join("include").display().to_string();
        let strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"];
        let options = [kernels::STANDARD, kernels::NVCC_GPU, "-I", &include];
        let what = ["-c", CUDA_EXAMPLE, "-o", &object];
        step(nvcc, self.workspace, &[&options[..], &strict, &what].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_separated_from_comments_and_types() {
        let header = "// peerway_in_a_comment(x)\n\
                      typedef struct peerway_end {\n    int peerway_field(int);\n} peerway_end;\n\
                      enum peerway_status peerway_batch_range(uint32_t direction,\n\
                      \x20                                   uint64_t len);\n\
                      const char *peerway_last_error(void);\n";
        let names: Vec<&str> = declared(header).collect();
        assert_eq!(names, ["peerway_batch_range", "peerway_last_error"]);
    }

    #[test]
    fn the_shared_library_has_the_name_that_its_build_script_gives_it() {
        let [whole, major] = shared_names();
        assert!(whole.starts_with(&major), "{whole} {major}");
        assert_eq!(major.rsplit('.').next(), VERSION.split('.').next());
    }
}
