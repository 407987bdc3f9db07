//! The library for C: put under a prefix as other programs find it, and tested from there.

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

/// What rustc's standard library needs of the system: `--print native-static-libs` names these.
const SYSTEM: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

const TOOLS: &[Tool] = &[
    Tool { program: "gcc", package: "gcc", why: "examples and tests in C" },
    Tool { program: "g++", package: "g++", why: "examples and tests in C++" },
    Tool { program: "valgrind", package: "valgrind", why: "memory errors of C programs" },
    Tool { program: "pkg-config", package: "pkgconf", why: "how C programs find the library" },
    Tool { program: "objcopy", package: "binutils", why: "the symbols of the library" },
];

/// How the library is built.
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

/// Builds the library and puts it, its headers and its pkg-config file under `prefix`: all or none.
pub(crate) fn install(
    workspace: &Path,
    target: &Path,
    prefix: &Path,
    profile: Profile,
) -> anyhow::Result<()> {
    let mut files = FileSet::default();
    stage(&mut files, workspace, target, prefix, profile)?;
    files.commit()?;
    println!("libpeerway {VERSION} ({}) is in {}", profile.directory(), prefix.display());
    Ok(())
}

/// Builds the library and adds what belongs under `prefix` to the files that are to be put there.
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

/// Builds the library, and returns the directory that it is in.
pub(crate) fn build(target: &Path, profile: Profile) -> anyhow::Result<PathBuf> {
    match profile {
        Profile::Debug => debug_build()?,
        Profile::Release => cargo(&["build", "--release", "--package", "peerway-c"], &[])?,
    }
    Ok(target.join(profile.directory()))
}

/// The shared library's file, and the name that programs ask for: its soname, which peerway-c's build script sets.
fn shared_names() -> [String; 2] {
    let major = VERSION.split('.').next().unwrap_or(VERSION);
    [format!("libpeerway.so.{VERSION}"), format!("libpeerway.so.{major}")]
}

/// Finds the prefix from where it lies itself, so that the whole of it can be moved.
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
    // Not written over: a program that runs has it mapped.
    let _ = fs::remove_file(to);
    fs::copy(from, to).with_context(|| format!("cannot copy {from:?} to {to:?}"))?;
    Ok(())
}

/// An archive of one object that shows its own calls alone: two libraries in Rust, or other versions of what they are made of, may
/// be linked into one program.
fn make_archive(from: &Path, to: &Path) -> anyhow::Result<()> {
    let whole = to.with_extension("o").display().to_string();
    let (from, to) = (from.display().to_string(), to.display().to_string());
    let _ = fs::remove_file(&to);
    output(Command::new("ld").args(["-r", "--whole-archive", "-o", &whole, &from]))?;
    // Rust's own library brings intermediate code along, which makes no sense any more when it is joined.
    let intermediate = ["--remove-section=.llvmbc", "--remove-section=.llvmcmd"];
    let calls = ["--wildcard", "--keep-global-symbol=peerway_*"];
    output(Command::new("objcopy").args(intermediate).args(calls).arg(&whole))?;
    output(Command::new("ar").args(["rcs", &to, &whole]))?;
    fs::remove_file(&whole).with_context(|| format!("cannot remove {whole:?}"))
}

/// The part `c`: header, symbols, examples and tests, each run as it is and under valgrind. `fake` is the library that plays GPUs.
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
/// Loads the library by itself, and leaves endpoints behind.
const UNLOADS: &str = "crates/peerway-c/tests/unload.c";
/// Not under valgrind: memory of the GPUs that are played is memory that nobody may touch.
const OF_GPUS: &str = "crates/peerway-c/tests/gpu.c";
const CUDA_EXAMPLE: &str = "examples/cuda/driven.cu";
/// What valgrind says of no mistake.
const SUPPRESSIONS: &str = "crates/peerway-c/tests/valgrind.supp";
pub(crate) const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-g"];

/// The calls of the header are what both libraries show, and nothing else is.
fn check_symbols(workspace: &Path, prefix: &Path) -> anyhow::Result<()> {
    let file = workspace.join(c_header::FILE);
    let header = fs::read_to_string(&file).with_context(|| format!("cannot read {file:?}"))?;
    let declared: BTreeSet<&str> = declared(&header).collect();
    for (name, which) in [("libpeerway.so", "--dynamic"), ("libpeerway.a", "--extern-only")] {
        let library = prefix.join("lib").join(name).display().to_string();
        let listed = output(Command::new("nm").args([which, "--defined-only", &library]))?;
        let shown: BTreeSet<&str> = listed.lines().filter_map(|l| l.split(' ').nth(2)).collect();
        let more: Vec<_> = shown.difference(&declared).collect();
        ensure!(more.is_empty(), "{name} shows {more:?}, which its header does not declare");
        let less: Vec<_> = declared.difference(&shown).collect();
        ensure!(less.is_empty(), "{name} lacks {less:?}, which its header declares");
        println!("{name} shows its {} calls and nothing else", shown.len());
    }
    Ok(())
}

/// Names that a header declares as functions: they start a line's declaration, not a comment.
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
    /// With our library for UCCL's interface too.
    Uccl,
    Static,
    /// Only by itself, when it runs.
    Not,
}

/// Where programs are compiled and run.
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

    /// As users find the library.
    fn pkg_config(&self, linked: Linked) -> anyhow::Result<String> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        command.args(match linked {
            Linked::Shared | Linked::Uccl => &["--cflags", "--libs"][..],
            Linked::Static => &["--cflags", "--libs", "--static"],
            Linked::Not => &["--cflags"],
        });
        let flags = output(command.arg("peerway"))?;
        // pkg-config knows what else is needed, not which of two libraries of one name is meant.
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
            // What pointers into the middle of a block, as hash tables have, is no leak.
            .args(["--leak-check=full", "--show-leak-kinds=definite,indirect"])
            .arg("--errors-for-leak-kinds=definite,indirect")
            // One thread at a time runs: waiters that spin must not keep those they wait for from their turn.
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
            Some(line) => Err(error.context(format!("valgrind says: {line}"))),
            None => Err(error),
        }
    }

    /// What valgrind wrote, of all processes.
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

    /// An object is all that can be had without a GPU.
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
    fn declarations_are_told_from_comments_and_types() {
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
