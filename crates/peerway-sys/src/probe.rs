//! Is a library here, which one, and if not, why not.
//!
//! Invariants: a probe never initialises a library (in particular it never calls `cuInit`, which
//! would create state that does not survive a fork); a library that was mapped stays mapped, because
//! vendor libraries leave exit handlers and thread-local destructors behind that must not outlive
//! their code. Called by `peerway doctor`; the function tables of the transports build on it.

use std::ffi::{CStr, OsStr, OsString, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{self, RTLD_LAZY, RTLD_LOCAL};

use crate::Library;

/// Looks for `library`: first where an environment variable says, then under its sonames.
///
/// # Errors
///
/// [`LoadError`] with every place that was tried and what was wrong there.
///
/// # Examples
///
/// ```
/// use peerway_sys::{Library, probe};
///
/// match probe(Library::Cuda) {
///     Ok(found) => println!("{found}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn probe(library: Library) -> Result<Found, LoadError> {
    probe_with(library, library.named())
}

/// As [`probe`], with the overriding path given by the caller instead of the environment.
///
/// # Errors
///
/// [`LoadError`] with every place that was tried and what was wrong there.
pub fn probe_with(library: Library, named: Option<OsString>) -> Result<Found, LoadError> {
    load_with(library, named, |_| Ok(())).map(|(found, ())| found)
}

/// As [`probe_with`], taking what `resolve` makes of the library. A candidate that `resolve` refuses is
/// passed over like one that is not there.
pub(crate) fn load_with<T>(
    library: Library,
    named: Option<OsString>,
    resolve: impl Fn(&Mapped) -> Result<T, String>,
) -> Result<(Found, T), LoadError> {
    let mut tried = Vec::new();
    let sonames = library.sonames().iter().map(OsString::from);
    for candidate in named.into_iter().chain(sonames) {
        match open(library, &candidate)
            .and_then(|(mapped, path)| Ok((resolve(&mapped)?, mapped, path)))
        {
            Ok((resolved, mapped, path)) => {
                let soname = candidate.to_string_lossy().into_owned();
                let version = version(library, &mapped);
                let found = Found { library, soname, path, version, passed_over: tried };
                return Ok((found, resolved));
            }
            Err(reason) => {
                let name = candidate.to_string_lossy().into_owned();
                tried.push(Tried { name, reason });
            }
        }
    }
    Err(LoadError { library, tried })
}

/// A library that is here.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Found {
    /// Which one.
    pub library: Library,
    /// The name it was opened by.
    pub soname: String,
    /// The file behind that name, where the loader tells.
    pub path: Option<PathBuf>,
    /// Its version, where it can be asked without initialising anything.
    pub version: Option<String>,
    /// What was tried before and could not be used, such as an override that names a wrong file.
    pub passed_over: Vec<Tried>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.library)?;
        if let Some(version) = &self.version {
            write!(f, " {version}")?;
        }
        match &self.path {
            Some(path) => write!(f, " at {}", path.display()),
            None => write!(f, " as {}", self.soname),
        }
    }
}

/// A place where a library was looked for in vain.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Tried {
    /// The path or soname.
    pub name: String,
    /// What was wrong, in the loader's words.
    pub reason: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The loader mostly begins with the name itself.
        if self.reason.starts_with(&self.name) {
            f.write_str(&self.reason)
        } else {
            write!(f, "{}: {}", self.name, self.reason)
        }
    }
}

/// A library that is not here, or not usable.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{library} (for {}) is not usable: {}", .library.purpose(), sentence(.tried))]
#[non_exhaustive]
pub struct LoadError {
    /// Which one.
    pub library: Library,
    /// Where it was looked for, and what was wrong there.
    pub tried: Vec<Tried>,
}

fn sentence(tried: &[Tried]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A library that was opened. Never unmapped; see the module header.
pub(crate) struct Mapped(ManuallyDrop<unix::Library>);

impl Mapped {
    /// The address of a symbol, or nothing where the library has none of that name.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a raw address is asked for, and given a type only by the caller, who knows it.
        let found = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok()?;
        let address = found.into_raw();
        (!address.is_null()).then_some(address)
    }

    /// The address of a symbol that must be there.
    pub(crate) fn require(&self, name: &CStr) -> Result<*mut c_void, String> {
        self.symbol(name).ok_or_else(|| format!("has no {}", name.to_string_lossy()))
    }
}

/// Maps one candidate and recognises it.
fn open(library: Library, candidate: &OsString) -> Result<(Mapped, Option<PathBuf>), String> {
    // SAFETY: opening runs the library's constructors. The candidate is either the soname of a library
    // made to be loaded this way or a path that the user chose for that purpose.
    let handle = unsafe { unix::Library::open(Some(candidate), RTLD_LAZY | RTLD_LOCAL) }
        .map_err(|error| one_line(&error))?;
    let mapped = Mapped(ManuallyDrop::new(handle));
    let landmark = mapped.require(library.landmark())?;
    Ok((mapped, file_of(landmark)))
}

/// The address of a function of a library that something in this process has loaded already; loads nothing. Costs
/// a tenth of a microsecond where nothing was loaded since it was last not there.
pub(crate) fn in_process(library: Library, name: &CStr) -> Option<*mut c_void> {
    let sonames = library.sonames().iter().map(OsString::from);
    let candidates: Vec<OsString> = library.named().into_iter().chain(sonames).collect();
    if !is_loaded(&candidates) {
        return None;
    }
    let found = candidates.iter().find_map(|candidate| {
        // SAFETY: with this flag nothing is loaded and nothing runs.
        unsafe { unix::Library::open(Some(candidate), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
    })?;
    Mapped(ManuallyDrop::new(found)).symbol(name)
}

/// Whether a file of one of these names is loaded. To ask the loader for a library that is not there has it look
/// through all its directories, so its list of what is there is looked through, and only when that has grown.
fn is_loaded(candidates: &[OsString]) -> bool {
    struct Search<'a> {
        candidates: &'a [OsString],
        without: u64,
        adds: u64,
        found: bool,
    }
    /// How many libraries had been loaded when none of them was it.
    static WITHOUT: AtomicU64 = AtomicU64::new(0);
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: the loader's description, and the search below.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
        search.adds = info.dlpi_adds;
        if search.adds == search.without {
            return 1;
        }
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the loader's own string.
        let path =
            Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()));
        search.found = search.candidates.iter().any(|candidate| {
            path.as_os_str() == candidate || path.file_name() == Path::new(candidate).file_name()
        });
        c_int::from(search.found)
    }
    let without = WITHOUT.load(Ordering::Relaxed);
    let mut search = Search { candidates, without, adds: 0, found: false };
    // SAFETY: the function has this type, and its data lives until the call is over.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    if !search.found {
        WITHOUT.store(search.adds, Ordering::Relaxed);
    }
    search.found
}

/// The version, from functions that their vendors document to work before any initialisation.
fn version(library: Library, mapped: &Mapped) -> Option<String> {
    type OutInt = unsafe extern "C" fn(*mut c_int) -> c_int;
    type OutTwoInts = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type ReturnsU32 = unsafe extern "C" fn() -> u32;

    match library {
        Library::Ibverbs | Library::Efa => None,
        Library::Fabric => {
            let function = mapped.symbol(c"fi_version")?;
            // SAFETY: `uint32_t fi_version(void)` in every libfabric.so.1; `function` is its address.
            let packed = unsafe { std::mem::transmute::<*mut c_void, ReturnsU32>(function)() };
            Some(format!("{}.{}", packed >> 16, packed & 0xffff))
        }
        Library::Cuda => {
            let function = mapped.symbol(c"cuDriverGetVersion")?;
            let mut packed = 0;
            // SAFETY: `CUresult cuDriverGetVersion(int*)`; it needs no cuInit and writes one int.
            let result =
                unsafe { std::mem::transmute::<*mut c_void, OutInt>(function)(&mut packed) };
            (result == 0).then(|| format!("{}.{}", packed / 1000, packed % 1000 / 10))
        }
        Library::Nvrtc => {
            let function = mapped.symbol(c"nvrtcVersion")?;
            let (mut major, mut minor) = (0, 0);
            // SAFETY: `nvrtcResult nvrtcVersion(int*, int*)`; it writes the two ints.
            let result = unsafe {
                std::mem::transmute::<*mut c_void, OutTwoInts>(function)(&mut major, &mut minor)
            };
            (result == 0).then(|| format!("{major}.{minor}"))
        }
        Library::Nccl => {
            let function = mapped.symbol(c"ncclGetVersion")?;
            let mut packed = 0;
            // SAFETY: `ncclResult_t ncclGetVersion(int*)`; it writes one int and touches no device.
            let result =
                unsafe { std::mem::transmute::<*mut c_void, OutInt>(function)(&mut packed) };
            (result == 0).then(|| nccl_version(packed))
        }
    }
}

/// NCCL packs 2.8 and older as `major * 1000 + minor * 100 + patch`, later ones with 10000.
fn nccl_version(packed: c_int) -> String {
    let major_at = if packed < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", packed / major_at, packed % major_at / 100, packed % 100)
}

/// The file that an address was mapped from, with symbolic links resolved: its name carries the full
/// version where the soname does not.
fn file_of(address: *mut c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` accepts any address and fills `info` when it returns non-zero.
    let known = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: all-zero is a valid `Dl_info` (null pointers), so it is initialised in either case.
    let info = unsafe { info.assume_init() };
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own NUL-terminated string, alive while the library is mapped, which is for
    // the rest of the process.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(name.to_str().ok()?);
    Some(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
}

/// The innermost message, without line breaks.
fn one_line(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the loader finds the C library, which is on every Linux machine.
    fn libc_path() -> PathBuf {
        file_of(libc::getpid as *mut c_void).expect("the C library is mapped")
    }

    #[test]
    fn an_absent_library_is_a_typed_answer_with_every_place_that_was_tried() {
        // No machine has this file, so the first place always fails; the rest may or may not.
        let missing = "/nonexistent/libnvrtc.so.13";
        let tried = match probe_with(Library::Nvrtc, Some(missing.into())) {
            Ok(found) => found.passed_over,
            Err(error) => {
                assert_eq!(error.library, Library::Nvrtc);
                assert_eq!(error.tried.len(), 3);
                let text = error.to_string();
                for part in ["libnvrtc", "GPU kernels", missing, "libnvrtc.so.12"] {
                    assert!(text.contains(part), "{text}");
                }
                assert!(!text.contains('\n'));
                error.tried
            }
        };
        assert_eq!(tried[0].name, missing);
        assert!(tried[0].to_string().contains("No such file"), "{}", tried[0]);
    }

    #[test]
    fn a_library_without_the_landmark_is_passed_over() {
        let wrong = libc_path();
        let tried = match probe_with(Library::Ibverbs, Some(wrong.clone().into_os_string())) {
            Ok(found) => found.passed_over,
            Err(error) => error.tried,
        };
        assert_eq!(tried[0].name, wrong.to_string_lossy());
        assert_eq!(tried[0].reason, "has no ibv_get_device_list");
    }

    #[test]
    fn a_file_that_is_no_library_is_passed_over() {
        let tried = match probe_with(Library::Nccl, Some("/proc/self/status".into())) {
            Ok(found) => found.passed_over,
            Err(error) => error.tried,
        };
        assert_eq!(tried[0].name, "/proc/self/status");
        assert!(!tried[0].reason.is_empty());
    }

    #[test]
    fn a_name_with_a_nul_byte_is_passed_over() {
        let tried = match probe_with(Library::Efa, Some("lib\0efa".into())) {
            Ok(found) => found.passed_over,
            Err(error) => error.tried,
        };
        assert!(!tried[0].reason.is_empty());
    }

    #[test]
    fn what_is_here_says_where() {
        for library in Library::ALL {
            if let Ok(found) = probe(library) {
                assert!(found.to_string().starts_with(library.name()));
                assert!(found.path.is_some_and(|path| path.is_absolute()));
            }
        }
    }

    #[test]
    fn symbols_are_found_and_missed() {
        // SAFETY: the C library is already mapped; opening it again runs nothing.
        let libc = unsafe { unix::Library::open(Some(libc_path()), RTLD_LAZY | RTLD_LOCAL) };
        let libc = Mapped(ManuallyDrop::new(libc.expect("the C library opens")));
        assert!(libc.symbol(c"getpid").is_some());
        assert!(libc.symbol(c"no_such_function").is_none());
        assert_eq!(libc.require(c"no_such_function"), Err("has no no_such_function".to_owned()));
        assert_eq!(version(Library::Fabric, &libc), None);
        assert_eq!(version(Library::Cuda, &libc), None);
        assert_eq!(version(Library::Nvrtc, &libc), None);
        assert_eq!(version(Library::Nccl, &libc), None);
    }

    #[test]
    fn nccl_versions() {
        assert_eq!(nccl_version(2708), "2.7.8");
        assert_eq!(nccl_version(22_809), "2.28.9");
    }
}
