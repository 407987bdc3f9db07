//! Finds vendor libraries and reports why one is not usable.
//!
//! Invariants:
//!
//! - A probe never initialises a library. In particular it never calls `cuInit`, which would create
//!   state that does not survive a fork.
//! - A mapped library stays mapped. Vendor libraries register exit handlers and thread-local
//!   destructors, which must not outlive their code.
//!
//! `peerway doctor` calls this module, and the function tables of the transports are built on it.

use std::ffi::{CStr, OsStr, OsString, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{self, RTLD_LAZY, RTLD_LOCAL};

use crate::Library;

/// Searches for `library`: first at the path in its environment variable, then under its sonames.
///
/// # Errors
///
/// [`LoadError`] with every candidate and the reason why it failed.
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

/// As [`probe`], but the caller passes the overriding path instead of the environment.
///
/// # Errors
///
/// [`LoadError`] with every candidate and the reason why it failed.
pub fn probe_with(library: Library, named: Option<OsString>) -> Result<Found, LoadError> {
    load_with(library, named, |_| Ok(())).map(|(found, ())| found)
}

/// As [`probe_with`], and also returns the result of `resolve`. A candidate that `resolve` refuses
/// is skipped like a missing one.
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

/// A usable library.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Found {
    /// The library.
    pub library: Library,
    /// The name that opened it.
    pub soname: String,
    /// The file behind that name, if the loader reports one.
    pub path: Option<PathBuf>,
    /// The version, if the library reports it without initialisation.
    pub version: Option<String>,
    /// The candidates that failed before this one, such as an override that names a wrong file.
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

/// A candidate that failed.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Tried {
    /// The path or soname.
    pub name: String,
    /// The reason, usually in the loader's words.
    pub reason: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The loader usually starts its message with the name.
        if self.reason.starts_with(&self.name) {
            f.write_str(&self.reason)
        } else {
            write!(f, "{}: {}", self.name, self.reason)
        }
    }
}

/// A library that is missing or not usable.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{library} (for {}) is not usable: {}", .library.purpose(), sentence(.tried))]
#[non_exhaustive]
pub struct LoadError {
    /// The library.
    pub library: Library,
    /// Every candidate and the reason why it failed.
    pub tried: Vec<Tried>,
}

fn sentence(tried: &[Tried]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// An open library. It is never unmapped; see the module documentation.
pub(crate) struct Mapped(ManuallyDrop<unix::Library>);

impl Mapped {
    /// The address of a symbol, or `None` if the library does not have it.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: this only looks up a raw address. The caller knows the type and casts it.
        let found = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok()?;
        let address = found.into_raw();
        (!address.is_null()).then_some(address)
    }

    /// The address of a required symbol.
    pub(crate) fn require(&self, name: &CStr) -> Result<*mut c_void, String> {
        self.symbol(name).ok_or_else(|| format!("has no {}", name.to_string_lossy()))
    }
}

/// Maps a candidate and checks that it is the expected library.
fn open(library: Library, candidate: &OsString) -> Result<(Mapped, Option<PathBuf>), String> {
    // SAFETY: opening runs the library's constructors. The candidate is either the soname of a
    // library that is made to be loaded this way, or a path that the user chose for that purpose.
    let handle = unsafe { unix::Library::open(Some(candidate), RTLD_LAZY | RTLD_LOCAL) }
        .map_err(|error| one_line(&error))?;
    let mapped = Mapped(ManuallyDrop::new(handle));
    let landmark = mapped.require(library.landmark())?;
    Ok((mapped, file_of(landmark)))
}

/// The address of a function in a library that this process has already loaded. This function loads
/// nothing. It takes a tenth of a microsecond if nothing was loaded since the last failed lookup.
pub(crate) fn in_process(library: Library, name: &CStr) -> Option<*mut c_void> {
    let sonames = library.sonames().iter().map(OsString::from);
    let candidates: Vec<OsString> = library.named().into_iter().chain(sonames).collect();
    if !is_loaded(&candidates) {
        return None;
    }
    let found = candidates.iter().find_map(|candidate| {
        // SAFETY: with RTLD_NOLOAD the call loads no library and runs no code of one.
        unsafe { unix::Library::open(Some(candidate), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
    })?;
    Mapped(ManuallyDrop::new(found)).symbol(name)
}

/// Whether a file with one of these names is loaded. If the library is missing, `dlopen` searches
/// all its directories. This function scans the loader's list instead, and only when that list has
/// grown.
fn is_loaded(candidates: &[OsString]) -> bool {
    struct Search<'a> {
        candidates: &'a [OsString],
        without: u64,
        adds: u64,
        found: bool,
    }
    /// The number of loaded libraries at the last scan that found no candidate.
    static WITHOUT: AtomicU64 = AtomicU64::new(0);
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid `info` and the `search` of the caller below.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
        search.adds = info.dlpi_adds;
        if search.adds == search.without {
            return 1;
        }
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the loader owns this NUL-terminated string and keeps it during the callback.
        let path =
            Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()));
        search.found = search.candidates.iter().any(|candidate| {
            path.as_os_str() == candidate || path.file_name() == Path::new(candidate).file_name()
        });
        c_int::from(search.found)
    }
    let without = WITHOUT.load(Ordering::Relaxed);
    let mut search = Search { candidates, without, adds: 0, found: false };
    // SAFETY: `look` has the required type, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    if !search.found {
        WITHOUT.store(search.adds, Ordering::Relaxed);
    }
    search.found
}

/// The version, from functions whose vendors document that they work before initialisation.
fn version(library: Library, mapped: &Mapped) -> Option<String> {
    type OutInt = unsafe extern "C" fn(*mut c_int) -> c_int;
    type OutTwoInts = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type ReturnsU32 = unsafe extern "C" fn() -> u32;

    match library {
        Library::Ibverbs | Library::Efa => None,
        Library::Fabric => {
            let function = mapped.symbol(c"fi_version")?;
            // SAFETY: `function` is the address of `uint32_t fi_version(void)`, which every
            // libfabric.so.1 has.
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

/// NCCL 2.8 and older pack the version as `major * 1000 + minor * 100 + patch`; later versions use
/// 10000.
fn nccl_version(packed: c_int) -> String {
    let major_at = if packed < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", packed / major_at, packed % major_at / 100, packed % 100)
}

/// The file that contains an address, with symbolic links resolved. Its name often has the full
/// version, which the soname lacks.
fn file_of(address: *mut c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` accepts any address and fills `info` when it returns non-zero.
    let known = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: all-zero is a valid `Dl_info` (null pointers), so `info` is initialised in both
    // cases.
    let info = unsafe { info.assume_init() };
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader owns this NUL-terminated string and keeps it while the library is mapped.
    // A [`Mapped`] library is never unmapped.
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

    /// The path of the C library, which every Linux machine has.
    fn libc_path() -> PathBuf {
        file_of(libc::getpid as *mut c_void).expect("the C library is mapped")
    }

    #[test]
    fn an_absent_library_is_a_typed_answer_with_every_place_that_was_tried() {
        // No machine has this file, so the first candidate always fails. The others may exist.
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
    fn a_found_library_reports_its_path() {
        for library in Library::ALL {
            if let Ok(found) = probe(library) {
                assert!(found.to_string().starts_with(library.name()));
                assert!(found.path.is_some_and(|path| path.is_absolute()));
            }
        }
    }

    #[test]
    fn symbols_are_found_and_missed() {
        // SAFETY: the C library is already mapped, so opening it again runs no code.
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
