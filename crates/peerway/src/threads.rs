//! Starts the engine's threads, each with a name and on the CPUs of its endpoint.
//!
//! A thread inherits the CPU mask of the thread that starts it. A program that pins its worker to
//! one core would thus pin all copy threads to that core. Every thread of the engine is therefore
//! started here and sets its own mask: the CPUs that `PEERWAY_CPUS` names, or else those that the
//! process had when the engine was loaded. That mask includes limits from outside (`taskset`,
//! `numactl`, a container's cpuset). Threads that work for a device prefer the CPUs of the mask
//! that are near it.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use peerway_core::config::{Config, ConfigError};
use peerway_core::topology::show_cpus;

use crate::os::affinity;

/// The setting that names CPUs.
const SETTING: &str = "PEERWAY_CPUS";

/// The CPUs on which threads may run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cpus {
    /// In order. Empty if the kernel does not report them: then threads keep the mask that they
    /// inherit.
    list: Arc<[usize]>,
}

impl Cpus {
    /// The CPUs that a setting names, or else those that the process started with.
    ///
    /// # Errors
    ///
    /// This process may use none of the named CPUs.
    pub fn choose(asked: Option<&[usize]>) -> Result<Self, ConfigError> {
        let Some(asked) = asked else {
            let cpus = Self::at_load();
            cpus.warn_of_one();
            return Ok(cpus);
        };
        let Ok(usable) = try_mask(asked) else {
            let possible = show_cpus(&possible());
            return Err(ConfigError::BadValue {
                name: SETTING.to_owned(),
                value: show_cpus(asked),
                allowed: format!("processors that this process may use: {possible}"),
            });
        };
        let left_out: Vec<usize> =
            asked.iter().copied().filter(|cpu| !usable.contains(cpu)).collect();
        if !left_out.is_empty() {
            tracing::warn!(
                "{SETTING} names processors that this process may not use: {}; \
                 engine threads run on {}",
                show_cpus(&left_out),
                show_cpus(&usable)
            );
        }
        Ok(Self { list: usable.into() })
    }

    /// The CPUs of the environment's setting, or else those that the process started with.
    ///
    /// # Errors
    ///
    /// The setting is invalid.
    pub fn of_environment() -> Result<Self, ConfigError> {
        let lookup = |name: &str| std::env::var(name).ok().filter(|_| name == SETTING);
        let (config, _) = Config::from_env(lookup)?;
        Self::choose(config.cpus.as_deref())
    }

    /// The CPUs for threads that belong to no endpoint. Endpoints report an invalid setting, so it
    /// is ignored here.
    pub fn of_process() -> Self {
        static CPUS: OnceLock<Cpus> = OnceLock::new();
        let choose = || Self::of_environment().unwrap_or_else(|_| Self::at_load());
        CPUS.get_or_init(choose).clone()
    }

    fn at_load() -> Self {
        Self { list: affinity::at_load().into() }
    }

    /// The CPUs that are also in `near`, or all if none is.
    pub(crate) fn near(&self, near: &[usize]) -> Self {
        let both: Arc<[usize]> = if self.list.is_empty() {
            near.into()
        } else {
            self.list.iter().copied().filter(|cpu| near.contains(cpu)).collect()
        };
        if both.is_empty() { self.clone() } else { Self { list: both } }
    }

    /// The numbers of the CPUs, in order. Empty if the kernel does not report them.
    pub fn numbers(&self) -> Vec<u32> {
        self.list.iter().filter_map(|cpu| u32::try_from(*cpu).ok()).collect()
    }

    /// Sets the mask of the calling thread.
    fn enter(&self) {
        if self.list.is_empty() {
            return;
        }
        if let Err(error) = affinity::pin_to(&self.list) {
            tracing::debug!(%error, cpus = %self, "a thread keeps the CPU mask of its creator");
        }
    }

    /// Warns if all threads share one CPU, which is slow. The user may want that, or the process
    /// was pinned before it loaded the engine. The engine cannot tell the two apart.
    fn warn_of_one(&self) {
        static WARNED: AtomicBool = AtomicBool::new(false);
        if self.list.len() == 1
            && !WARNED.swap(true, Ordering::Relaxed)
            && let possible = possible()
            && possible.len() > 1
        {
            tracing::warn!(
                "engine threads share processor {self}, the only one that the process had when it \
                 loaded Peerway; set {SETTING} to use others, such as {}",
                show_cpus(&possible)
            );
        }
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_cpus(&self.list))
    }
}

/// Starts a thread of the engine.
///
/// # Errors
///
/// The system has no room for another thread.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    cpus: &Cpus,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(on(cpus.clone(), work))
}

/// Does [`spawn`] for a thread that ends with its scope.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: impl Into<String>,
    cpus: &Cpus,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, on(cpus.clone(), work))
}

/// Wraps `work` so that the thread first sets its CPU mask.
fn on<T>(cpus: Cpus, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || {
        cpus.enter();
        work()
    }
}

/// All CPUs that the kernel lets this process use, whatever its threads are pinned to now.
fn possible() -> Vec<usize> {
    try_mask(&(0..affinity::MOST).collect::<Vec<_>>()).unwrap_or_else(|_| affinity::at_load())
}

/// The CPUs of the list that the kernel lets a thread of this process use. A temporary thread tries
/// the mask.
fn try_mask(cpus: &[usize]) -> io::Result<Vec<usize>> {
    let nameable: Vec<usize> = cpus.iter().copied().filter(|cpu| *cpu < affinity::MOST).collect();
    let tried = Builder::new().name("peerway-cpus".into()).spawn(move || {
        affinity::pin_to(&nameable)?;
        affinity::of_this_thread()
    })?;
    tried.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &[usize]) -> Cpus {
        Cpus { list: list.into() }
    }

    #[test]
    fn a_thread_near_a_device_stays_on_the_endpoints_processors() {
        assert_eq!(cpus(&[0, 1, 2, 3]).near(&[2, 3, 4]), cpus(&[2, 3]));
        assert_eq!(cpus(&[0, 1]).near(&[8, 9]), cpus(&[0, 1]), "no CPU is near: keep all");
        assert_eq!(cpus(&[0, 1]).near(&[]), cpus(&[0, 1]), "near CPUs unknown: keep all");
        assert_eq!(cpus(&[]).near(&[8, 9]), cpus(&[8, 9]), "allowed CPUs unknown: use near ones");
    }

    #[test]
    fn threads_have_the_name_and_the_mask_that_they_were_started_with() {
        let one = cpus(&Cpus::at_load().list[..1]);
        let seen =
            || (std::thread::current().name().map(str::to_owned), affinity::of_this_thread());
        let (name, mask) = spawn("peerway-test", &one, seen).unwrap().join().unwrap();
        assert_eq!(
            (name.as_deref(), mask.unwrap().as_slice()),
            (Some("peerway-test"), &one.list[..])
        );
        std::thread::scope(|scope| {
            let (name, mask) =
                spawn_scoped(scope, "peerway-scope", &one, seen).unwrap().join().unwrap();
            assert_eq!(name.as_deref(), Some("peerway-scope"));
            assert_eq!(mask.unwrap().as_slice(), &one.list[..]);
        });
    }

    #[test]
    fn processors_that_cannot_be_used_are_an_error_or_left_out() {
        let usable = possible();
        let error = Cpus::choose(Some(&[affinity::MOST + 7])).unwrap_err().to_string();
        for part in ["PEERWAY_CPUS", "1031", &show_cpus(&usable)] {
            assert!(error.contains(part), "{error}");
        }
        let chosen = Cpus::choose(Some(&[usable[0], affinity::MOST + 7])).unwrap();
        assert_eq!(chosen.numbers(), [usable[0] as u32]);
    }
}
