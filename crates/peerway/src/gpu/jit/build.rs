//! Provides an image: from the cache, or compiled and stored.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use peerway_sys::nvrtc::Architecture;

use super::cache::KernelCache;
use super::compiler::Compiler;
use super::entry::CacheEntry;
use super::key::Digest;
use super::{Image, JitError, Source, Status};

/// What an image must run on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Wanted {
    /// Exactly this architecture.
    Architecture(Architecture),
    /// A GPU with this compute capability, as a number such as 90.
    Gpu(u32),
}

impl Wanted {
    /// The best architecture for it that a compiler supports.
    fn choose(self, compiler: &dyn Compiler) -> Result<Architecture, JitError> {
        let wished = match self {
            Self::Architecture(architecture) => architecture,
            Self::Gpu(number) => Architecture::code(number),
        };
        // If the compiler does not list its architectures, try this one.
        let Some(known) = compiler.knows() else { return Ok(wished) };
        if known.contains(&wished.number()) {
            return Ok(wished);
        }
        let older = known.iter().rfind(|known| **known < wished.number());
        if let (Self::Gpu(_), Some(older)) = (self, older) {
            return Ok(Architecture::ptx(*older));
        }
        Err(JitError::ArchitectureUnknown {
            architecture: wished,
            compiler: compiler.identity().to_owned(),
            known: known.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
        })
    }

    /// How well an image for an architecture fits; higher is better, `None` is unusable. The usable
    /// ones are those that [`Self::choose`] returns for some compiler.
    fn rank(self, architecture: Architecture) -> Option<u32> {
        match self {
            Self::Architecture(wanted) => (architecture == wanted).then_some(0),
            Self::Gpu(number) if architecture == Architecture::code(number) => Some(u32::MAX),
            Self::Gpu(number) => {
                let older = architecture.number();
                (architecture == Architecture::ptx(older) && older < number).then_some(older)
            }
        }
    }
}

/// Finds and compiles images.
pub(super) struct Jit {
    cache: KernelCache,
    find: Find,
    /// Images that are being looked up or compiled now.
    under_way: Mutex<HashMap<(Digest, Wanted), Arc<UnderWay>>>,
}

type Find = Box<dyn Fn() -> Result<Arc<dyn Compiler>, String> + Send + Sync>;
type UnderWay = OnceLock<Result<Image, JitError>>;

impl Jit {
    pub(super) fn new(
        cache: KernelCache,
        find: impl Fn() -> Result<Arc<dyn Compiler>, String> + Send + Sync + 'static,
    ) -> Self {
        Self { cache, find: Box::new(find), under_way: Mutex::default() }
    }

    /// The image, made by this thread or by another one that requested the same image just before.
    pub(super) fn image(&self, source: &Source, wanted: Wanted) -> Result<Image, JitError> {
        source.check()?;
        let program = Digest::of_program(source);
        let key = (program, wanted);
        let mine = self.under_way().entry(key).or_default().clone();
        let image = mine.get_or_init(|| self.find_or_compile(source, &program, wanted)).clone();
        let mut under_way = self.under_way();
        // Later callers look on disk again.
        if under_way.get(&key).is_some_and(|other| Arc::ptr_eq(other, &mine)) {
            under_way.remove(&key);
        }
        image
    }

    pub(super) fn status(&self) -> Status {
        let contents = self.cache.contents();
        Status {
            compiler: (self.find)().map(|compiler| compiler.identity().to_owned()),
            directory: self.cache.directory().map(Into::into),
            images: contents.images,
            bytes: contents.bytes,
            problem: contents.problem,
        }
    }

    fn find_or_compile(
        &self,
        source: &Source,
        program: &Digest,
        wanted: Wanted,
    ) -> Result<Image, JitError> {
        let is_whole = source.is_whole();
        let compiler = match (self.find)() {
            Ok(compiler) => compiler,
            Err(reasons) => {
                let any = || self.cache.get_any(program, |architecture| wanted.rank(architecture));
                let found = is_whole.then(any).flatten();
                let none = || JitError::NoCompiler { name: source.name.clone(), reasons };
                let (architecture, entry) = found.ok_or_else(none)?;
                return Ok(image(entry, architecture, true));
            }
        };
        let architecture = wanted.choose(&*compiler)?;
        let identity = compiler.identity();
        if is_whole && let Some(entry) = self.cache.get(program, architecture, identity) {
            return Ok(image(entry, architecture, true));
        }
        let started = std::time::Instant::now();
        let compiled = compiler.compile(source, architecture).map_err(|log| JitError::Compile {
            name: source.name.clone(),
            architecture,
            compiler: identity.to_owned(),
            log,
        })?;
        let took = started.elapsed();
        tracing::debug!(name = source.name, %architecture, compiler = identity, ?took, "compiled");
        let entry = CacheEntry { compiler: identity.to_owned(), image: compiled };
        if is_whole {
            self.cache.put(program, architecture, &entry);
        }
        Ok(image(entry, architecture, false))
    }

    fn under_way(&self) -> std::sync::MutexGuard<'_, HashMap<(Digest, Wanted), Arc<UnderWay>>> {
        // No code panics while the lock is held, so a poisoned lock is still consistent.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn cache(&self) -> &KernelCache {
        &self.cache
    }
}

fn image(entry: CacheEntry, architecture: Architecture, was_cached: bool) -> Image {
    let CacheEntry { compiler, image } = entry;
    Image { bytes: image.into(), architecture, compiler, was_cached }
}
