//! Images from a cache in a directory of the test. A stand-in that counts compiles them, and NVRTC
//! if it is available.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use peerway_sys::nvrtc::Architecture;

use super::build::{Jit, Wanted};
use super::cache::{KernelCache, LIMIT};
use super::compiler::{Compiler, FoundCompiler};
use super::key::{Digest, file_name};
use super::place::Place;
use super::{Image, JitError, Source};

const SM_90: Wanted = Wanted::Architecture(Architecture::code(90));
const COMPILER: &str = "stand-in 1";

/// Compiles to a text that describes the input.
struct StandIn {
    identity: &'static str,
    knows: &'static [u32],
    compiled: Arc<AtomicUsize>,
    takes: Duration,
}

impl Compiler for StandIn {
    fn identity(&self) -> &str {
        self.identity
    }

    fn knows(&self) -> Option<&[u32]> {
        Some(self.knows)
    }

    fn compile(&self, source: &Source, architecture: Architecture) -> Result<Vec<u8>, String> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        thread::sleep(self.takes);
        match source.text.as_str() {
            "error" => Err("error: there is an error".to_owned()),
            text => Ok(image_of(text, architecture, self.identity)),
        }
    }
}

fn image_of(text: &str, architecture: Architecture, compiler: &str) -> Vec<u8> {
    format!("{text} for {architecture} by {compiler}").repeat(20).into_bytes()
}

/// A directory that is removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("peerway-jit-{}-{next}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    /// The images and unfinished images.
    fn files(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.cache()) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn cache(&self) -> PathBuf {
        self.0.join("deep/kernels")
    }

    fn jit(&self) -> (Jit, Arc<AtomicUsize>) {
        jit(Place::At(self.cache()), LIMIT, COMPILER)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A `Jit` with a stand-in, and the number of its compilations.
fn jit(place: Place, limit: u64, identity: &'static str) -> (Jit, Arc<AtomicUsize>) {
    let compiled = Arc::<AtomicUsize>::default();
    let count = compiled.clone();
    let find = move || {
        let (compiled, takes) = (count.clone(), Duration::from_millis(20));
        Ok(Arc::new(StandIn { identity, knows: &[80, 90], compiled, takes }) as Arc<dyn Compiler>)
    };
    (Jit::new(KernelCache::new(place, limit), find), compiled)
}

/// A `Jit` without a compiler.
fn without(directory: &Path) -> Jit {
    let place = Place::At(directory.into());
    Jit::new(KernelCache::new(place, LIMIT), || Err("libnvrtc is nowhere".to_owned()))
}

fn source(text: &str) -> Source {
    Source::new("test.cu", text)
}

/// The file with the image of a source.
fn file_of(directory: &Path, source: &Source) -> PathBuf {
    directory.join(file_name(&Digest::of_program(source), Architecture::code(90), COMPILER))
}

fn assert_right(image: &Image, text: &str) {
    assert_eq!(image.bytes(), image_of(text, image.architecture(), image.compiler()));
}

#[test]
fn compiled_images_are_found_by_the_next_process() {
    let temporary = Temporary::new();
    let (first, compiled) = temporary.jit();
    let made = first.image(&source("a"), SM_90).unwrap();
    assert!(!made.was_cached());
    assert_right(&made, "a");
    for jit in [first, temporary.jit().0] {
        let found = jit.image(&source("a"), SM_90).unwrap();
        assert!(found.was_cached());
        assert_eq!((found.bytes(), found.compiler()), (made.bytes(), COMPILER));
    }
    assert_eq!(compiled.load(Ordering::Relaxed), 1);
    let (again, compiled) = temporary.jit();
    again.image(&source("b"), SM_90).unwrap();
    again.image(&source("a"), Wanted::Architecture(Architecture::ptx(90))).unwrap();
    again.image(&source("a").option("-D"), SM_90).unwrap();
    let (newer, by_newer) = jit(Place::At(temporary.cache()), LIMIT, "stand-in 2");
    assert!(!newer.image(&source("a"), SM_90).unwrap().was_cached());
    assert_eq!((compiled.load(Ordering::Relaxed), by_newer.load(Ordering::Relaxed)), (3, 1));

    let status = again.status();
    assert_eq!(status.compiler, Ok(COMPILER.to_owned()));
    assert_eq!((status.images, status.directory), (5, Some(temporary.cache())));
    assert_eq!(status.bytes, temporary.files().iter().map(|f| f.metadata().unwrap().len()).sum());
    assert_eq!(temporary.cache().metadata().unwrap().mode() & 0o777, 0o700);
    assert!(temporary.files().iter().all(|file| file.metadata().unwrap().mode() & 0o777 == 0o600));
}

#[test]
fn invalid_files_are_compiled_again() {
    let temporary = Temporary::new();
    let directory = temporary.cache();
    let file = file_of(&directory, &source("a"));
    let other = file_of(&directory, &source("b"));
    let change = |at: usize| {
        let mut bytes = fs::read(&file).unwrap();
        bytes[at] ^= 1;
        fs::write(&file, bytes).unwrap();
    };
    let cut = |len: u64| File::options().write(true).open(&file).unwrap().set_len(len).unwrap();
    let ways: &[(&str, &dyn Fn())] = &[
        ("magic", &|| change(0)),
        ("format", &|| change(8)),
        ("length", &|| change(16)),
        ("key", &|| change(30)),
        ("image", &|| change(file.metadata().unwrap().len() as usize - 1)),
        ("cut in the image", &|| cut(file.metadata().unwrap().len() - 1)),
        ("cut in the header", &|| cut(40)),
        ("empty", &|| cut(0)),
        ("another image under this name", &|| {
            fs::copy(&other, &file).unwrap();
        }),
        ("writable by others", &|| {
            fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
        }),
        ("a link", &|| {
            fs::rename(&file, directory.join("elsewhere")).unwrap();
            std::os::unix::fs::symlink("elsewhere", &file).unwrap();
        }),
        ("a pipe", &|| {
            fs::remove_file(&file).unwrap();
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &file,
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::RUSR,
                0,
            )
            .unwrap();
        }),
        ("of another user", &|| {
            // Only root can change the owner; for other users the file stays broken by the change
            // before.
            change(0);
            let _ = std::os::unix::fs::chown(&file, Some(12345), None);
        }),
    ];
    let (jit, compiled) = temporary.jit();
    jit.image(&source("b"), SM_90).unwrap();
    jit.image(&source("a"), SM_90).unwrap();
    for (what, spoil) in ways {
        compiled.store(0, Ordering::Relaxed);
        assert!(jit.image(&source("a"), SM_90).unwrap().was_cached());
        spoil();
        let made = jit.image(&source("a"), SM_90).unwrap();
        assert!(!made.was_cached(), "{what}");
        assert_right(&made, "a");
        let found = jit.image(&source("a"), SM_90).unwrap();
        assert!(found.was_cached(), "{what}");
        assert_right(&found, "a");
        assert_eq!(compiled.load(Ordering::Relaxed), 1, "{what}");
    }
    assert!(!jit.cache().has_told(), "the directory was always usable");
}

#[test]
fn a_directory_that_cannot_be_used_only_costs_time() {
    let temporary = Temporary::new();
    File::create(temporary.0.join("file")).unwrap();
    let open = temporary.0.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let places = [
        (Place::At(temporary.0.join("file/kernels")), Some("Not a directory")),
        (Place::At(PathBuf::from("/proc/self/no-such-directory")), None),
        (Place::At(open.clone()), Some("written by other users")),
        (Place::Unknown, Some("PEERWAY_KERNEL_CACHE")),
    ];
    for (place, problem) in places {
        let (jit, compiled) = jit(place.clone(), LIMIT, COMPILER);
        for count in 1..=2 {
            let made = jit.image(&source("a"), SM_90).unwrap();
            assert!(!made.was_cached());
            assert_right(&made, "a");
            assert_eq!(compiled.load(Ordering::Relaxed), count);
        }
        assert!(jit.cache().has_told(), "{place:?}");
        if let Some(problem) = problem {
            let said = jit.status().problem.unwrap();
            assert!(said.contains(problem), "{said}");
        }
    }
    assert_eq!(fs::read_dir(open).unwrap().count(), 0);
    // An explicit "off" is not a problem, and an image that does not fit is not stored.
    let (off, _) = jit(Place::Off, LIMIT, COMPILER);
    assert!(!off.image(&source("a"), SM_90).unwrap().was_cached());
    assert!(!off.cache().has_told() && off.status().problem.is_none());
    let (small, _) = jit(Place::At(temporary.cache()), 100, COMPILER);
    assert!(!small.image(&source("a"), SM_90).unwrap().was_cached());
    assert!(temporary.files().is_empty());
}

#[test]
fn the_least_recently_used_image_is_evicted_first() {
    let temporary = Temporary::new();
    let directory = temporary.cache();
    let (unbounded, _) = temporary.jit();
    for text in ["a", "b", "c"] {
        unbounded.image(&source(text), SM_90).unwrap();
    }
    let len = file_of(&directory, &source("a")).metadata().unwrap().len();
    let age = |file: PathBuf, hours: u64| {
        let then = SystemTime::now() - Duration::from_secs(hours * 3600);
        File::options().write(true).open(file).unwrap().set_modified(then).unwrap();
    };
    for (text, hours) in [("a", 3), ("b", 2), ("c", 1)] {
        age(file_of(&directory, &source(text)), hours);
    }
    for (name, hours) in [(".new-old", 5), (".new-young", 0), ("notes.txt", 9)] {
        File::create(directory.join(name)).unwrap();
        age(directory.join(name), hours);
    }
    let (jit, compiled) = jit(Place::At(directory.clone()), 3 * len, COMPILER);
    // It was used just now, so it stays although it is the oldest.
    assert!(jit.image(&source("a"), SM_90).unwrap().was_cached());
    jit.image(&source("d"), SM_90).unwrap();
    assert_eq!(compiled.load(Ordering::Relaxed), 1);
    let is_there = |text| file_of(&directory, &source(text)).exists();
    assert!(is_there("a") && !is_there("b") && is_there("c") && is_there("d"));
    assert!(!directory.join(".new-old").exists() && directory.join(".new-young").exists());
    assert!(directory.join("notes.txt").exists(), "the cache removes only its own files");
}

#[test]
fn threads_that_want_the_same_wait_for_one() {
    let temporary = Temporary::new();
    for place in [Place::At(temporary.cache()), Place::Off] {
        let kept = place != Place::Off;
        let (jit, compiled) = jit(place, LIMIT, COMPILER);
        let barrier = std::sync::Barrier::new(8);
        thread::scope(|scope| {
            for i in 0..8 {
                let (jit, barrier) = (&jit, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    assert_right(&jit.image(&source("same"), SM_90).unwrap(), "same");
                    let own = format!("own {i}");
                    assert_right(&jit.image(&source(&own), SM_90).unwrap(), &own);
                });
            }
        });
        let compiled = compiled.load(Ordering::Relaxed) - 8;
        // Without a cache, a thread that is delayed for longer than a compilation compiles again.
        assert!(compiled == 1 || !kept && compiled < 8, "{compiled}");
    }
}

#[test]
fn compile_errors_are_reported_each_time() {
    let temporary = Temporary::new();
    let (jit, compiled) = temporary.jit();
    for _ in 0..2 {
        let said = jit.image(&source("error"), SM_90).unwrap_err().to_string();
        for part in ["test.cu", "sm_90", COMPILER, "there is an error"] {
            assert!(said.contains(part), "{said}");
        }
    }
    assert_eq!(compiled.load(Ordering::Relaxed), 2);
    assert!(temporary.files().is_empty());
}

const SHARED: &str = "PEERWAY_TEST_JIT_SHARED";

/// Starts this test twice as a child process. The children compile the same programs into one
/// directory that is too small for all of them.
#[test]
fn two_processes_at_once() {
    const ROUNDS: usize = 60;
    let limit = 20_000;
    if let Some(directory) = std::env::var_os(SHARED) {
        let (jit, compiled) = jit(Place::At(directory.into()), limit, COMPILER);
        for round in 0..ROUNDS {
            let text = format!("round {}", round / 2);
            assert_right(&jit.image(&source(&text), SM_90).unwrap(), &text);
        }
        assert!(!jit.cache().has_told());
        assert!(compiled.load(Ordering::Relaxed) <= ROUNDS / 2 + 5, "most were found");
        return;
    }
    let temporary = Temporary::new();
    let start = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["gpu::jit::tests::two_processes_at_once", "--exact", "--nocapture"]);
        command.env(SHARED, temporary.cache()).spawn().unwrap()
    };
    for mut child in [start(), start()] {
        assert!(child.wait().unwrap().success());
    }
    let (jit, _) = temporary.jit();
    let status = jit.status();
    assert!(status.images > 5 && status.bytes <= limit, "{status:?}");
    assert_eq!(temporary.files().len(), status.images, "nothing unfinished is left");
    let last = format!("round {}", ROUNDS / 2 - 1);
    assert!(jit.image(&source(&last), SM_90).unwrap().was_cached());
}

#[test]
fn without_a_compiler_cached_images_are_used() {
    let temporary = Temporary::new();
    let directory = temporary.cache();
    let place = || Place::At(directory.clone());
    let none = without(&directory);
    let failed = none.image(&source("a"), SM_90).unwrap_err();
    let said = failed.to_string();
    assert!(matches!(failed, JitError::NoCompiler { .. }));
    for part in ["test.cu", "libnvrtc is nowhere", "nvidia-cuda-nvrtc", "PEERWAY_NVRTC_SO"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(none.status().compiler.is_err());
    assert!(!directory.exists(), "a lookup creates no directory");

    // For a GPU that the compiler does not support, PTX for the newest one that it supports.
    let (one, _) = jit(place(), LIMIT, COMPILER);
    let ptx = one.image(&source("a"), Wanted::Gpu(100)).unwrap();
    assert_eq!(ptx.architecture(), Architecture::ptx(90));
    let found = none.image(&source("a"), Wanted::Gpu(100)).unwrap();
    assert_eq!((found.bytes(), found.was_cached()), (ptx.bytes(), true));
    // Code for the GPU is better than PTX. Of two such images, the most recently used one is
    // better.
    one.image(&source("a"), Wanted::Gpu(80)).unwrap();
    let (two, _) = jit(place(), LIMIT, "stand-in 2");
    for (jit, compiler) in [(&two, "stand-in 2"), (&one, COMPILER)] {
        thread::sleep(Duration::from_millis(20));
        jit.image(&source("a"), SM_90).unwrap();
        let found = none.image(&source("a"), Wanted::Gpu(90)).unwrap();
        assert_eq!((found.architecture(), found.compiler()), (Architecture::code(90), compiler));
        assert_right(&found, "a");
    }
    // Not PTX for a later GPU, code for another GPU, another program, or a corrupt file.
    assert!(none.image(&source("a"), Wanted::Gpu(75)).is_err());
    assert!(none.image(&source("b"), Wanted::Gpu(90)).is_err());
    fs::write(file_of(&directory, &source("a")), "garbage").unwrap();
    assert_eq!(none.image(&source("a"), SM_90).unwrap().compiler(), "stand-in 2");
}

#[test]
fn unknown_architectures_are_reported() {
    let temporary = Temporary::new();
    let (jit, compiled) = temporary.jit();
    let newer = Wanted::Architecture("sm_100a".parse().unwrap());
    for wanted in [newer, Wanted::Gpu(75)] {
        let said = jit.image(&source("a"), wanted).unwrap_err().to_string();
        assert!(said.contains(COMPILER) && said.contains("80, 90"), "{said}");
    }
    assert_eq!(compiled.load(Ordering::Relaxed), 0);
}

#[test]
fn images_that_depend_on_files_are_not_cached() {
    let temporary = Temporary::new();
    let (jit, compiled) = temporary.jit();
    for _ in 0..2 {
        let made = jit.image(&source("a").option("-Iinclude"), SM_90).unwrap();
        assert!(!made.was_cached());
    }
    assert_eq!(compiled.load(Ordering::Relaxed), 2);
    assert!(temporary.files().is_empty());
}

#[test]
fn a_wrong_suggestion_is_reported_with_the_other_places_tried() {
    // If the system has a compiler, it is used instead.
    if let Err(said) = FoundCompiler::load_suggested(Path::new("/nowhere/libnvrtc.so.12")) {
        assert!(said.contains("/nowhere/libnvrtc.so.12: "), "{said}");
        assert!(said.contains("; libnvrtc") && said.contains("libnvrtc.so.13"), "{said}");
    }
}

mod needs_root {
    use super::*;

    #[test]
    #[ignore = "probes whether this process may change the owner of files"]
    fn probe() {
        let temporary = Temporary::new();
        let file = temporary.0.join("file");
        File::create(&file).unwrap();
        std::os::unix::fs::chown(&file, Some(12345), None)
            .expect("only root can change the owner of files");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test --only test"]
    fn nothing_of_another_user_is_believed() {
        let temporary = Temporary::new();
        let (jit, _) = temporary.jit();
        jit.image(&source("a"), SM_90).unwrap();
        let file = file_of(&temporary.cache(), &source("a"));
        // The image is complete; only its owner is wrong. Only root can create this case.
        std::os::unix::fs::chown(&file, Some(12345), None).unwrap();
        assert!(!jit.image(&source("a"), SM_90).unwrap().was_cached());
        assert_eq!(file.metadata().unwrap().uid(), rustix::process::geteuid().as_raw());
        assert!(jit.image(&source("a"), SM_90).unwrap().was_cached());
        std::os::unix::fs::chown(temporary.cache(), Some(12345), None).unwrap();
        assert!(!jit.image(&source("a"), SM_90).unwrap().was_cached());
        assert!(jit.cache().has_told());
        assert!(jit.status().problem.unwrap().contains("another user"));
    }
}

mod needs_nvrtc {
    use super::*;

    #[test]
    #[ignore = "probes whether PEERWAY_TEST_NVRTC names NVRTC"]
    fn probe() {
        std::env::var_os("PEERWAY_TEST_NVRTC").expect("PEERWAY_TEST_NVRTC is not set");
    }

    /// With the NVRTC that `PEERWAY_TEST_NVRTC` names.
    #[test]
    #[ignore = "needs NVRTC, named by PEERWAY_TEST_NVRTC: cargo xtask test --only test"]
    fn nvrtc_compiles() {
        let library = std::env::var_os("PEERWAY_TEST_NVRTC").unwrap();
        // A suggested library is used. If it is not NVRTC, the system's library is used,
        // if any.
        let suggested = FoundCompiler::load_suggested(Path::new(&library)).map(|_| ()).err();
        assert_eq!(suggested, None);
        let temporary = Temporary::new();
        let make = || {
            let library = library.clone();
            let find = move || {
                Ok(Arc::new(FoundCompiler::load(Some(library.clone()))?) as Arc<dyn Compiler>)
            };
            Jit::new(KernelCache::new(Place::At(temporary.cache()), LIMIT), find)
        };
        let jit = make();
        let text = "#include \"by.h\"\nextern \"C\" __global__ void grow(int *x) { *x += BY; }\n";
        let grow =
            Source::new("grow.cu", text).option("--std=c++17").header("by.h", "#define BY 42\n");
        let ptx = jit.image(&grow, Wanted::Architecture(Architecture::ptx(80))).unwrap();
        let ptx_text = String::from_utf8_lossy(ptx.bytes());
        assert!(ptx_text.contains(".entry grow") && ptx_text.contains("42"), "{ptx_text}");
        assert_eq!(ptx.bytes().last(), Some(&0));
        let code = jit.image(&grow, Wanted::Gpu(90)).unwrap();
        assert_eq!(code.architecture(), Architecture::code(90));
        assert!(code.bytes().starts_with(b"\x7fELF"));
        assert!(code.compiler().starts_with("NVRTC 1"), "{}", code.compiler());
        let again = make().image(&grow, Wanted::Gpu(90)).unwrap();
        assert_eq!((again.bytes(), again.was_cached()), (code.bytes(), true));
        assert_eq!(without(&temporary.cache()).image(&grow, Wanted::Gpu(90)).unwrap(), again);

        let wrong = Source::new("wrong.cu", "__global__ void wrong() { no_such_thing(); }");
        let said = jit.image(&wrong, SM_90).unwrap_err().to_string();
        for part in ["wrong.cu", "sm_90", "no_such_thing"] {
            assert!(said.contains(part), "{said}");
        }
        // A file next to a file with the source's name is not covered by the key.
        fs::write(temporary.0.join("beside.h"), "#define BY 1\n").unwrap();
        let name = temporary.0.join("beside.cu").display().to_string();
        let beside = Source::new(name, text.replace("by.h", "beside.h"));
        assert!(matches!(jit.image(&beside, SM_90), Err(JitError::Compile { .. })));
        // Neither is a file in the working directory.
        assert!(Path::new("kernels/copy.cu").exists(), "tests run in the package's directory");
        let near = Source::new("near.cu", "#include \"kernels/copy.cu\"\n");
        assert!(matches!(jit.image(&near, SM_90), Err(JitError::Compile { .. })));
        let named = beside.option(format!("-I{}", temporary.0.display()));
        assert!(!jit.image(&named, SM_90).unwrap().was_cached());
        let unknown = Wanted::Architecture("sm_999".parse().unwrap());
        assert!(matches!(jit.image(&grow, unknown), Err(JitError::ArchitectureUnknown { .. })));
        // An image that is not executable code is refused.
        let relocatable = grow.option("--dlink-time-opt");
        assert!(matches!(jit.image(&relocatable, SM_90), Err(JitError::Compile { .. })));
    }
}
