//! Handles: numbers that C holds instead of pointers.
//!
//! A handle encodes its kind, the index of its place in a table, and the generation of that place.
//! It is never an address. The library answers a freed handle, a handle of another kind, or any
//! other number with a status. A program that dereferences a handle faults.
//!
//! A call keeps the values of its handles alive while it runs, so a program may free a handle while
//! another thread is in a call with it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use crate::status::{Answer, Failure, peerway_status};

/// The bits of a handle, from the lowest: the index, the generation, the kind.
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 34;
const GENERATIONS: u64 = 1 << GENERATION_BITS;

/// The first chunk has 64 places. Each further chunk has twice as many as the previous one.
const FIRST_CHUNK: u32 = 64;
const CHUNKS: usize = 18;
/// The most handles of one kind at the same time.
const MOST: u32 = FIRST_CHUNK * ((1 << CHUNKS) - 1);

// A handle fits into a pointer, and an index into its bits.
const _: () = assert!(size_of::<usize>() == 8 && MOST < 1 << INDEX_BITS);

/// A type that C knows as an incomplete struct.
pub(crate) trait Handle: Sized + 'static {
    /// The value behind a handle.
    type Value: Send + Sync;
    /// The table of the values.
    fn table() -> &'static Table<Self::Value>;
}

/// Makes a type a handle. Takes the type, its value, a name for messages, and a unique kind from 1
/// to 63.
macro_rules! handle {
    ($handle:ty, $value:ty, $what:literal, $kind:literal) => {
        impl $crate::handles::Handle for $handle {
            type Value = $value;
            fn table() -> &'static $crate::handles::Table<$value> {
                static TABLE: $crate::handles::Table<$value> =
                    $crate::handles::Table::new($what, $kind);
                &TABLE
            }
        }
    };
}
pub(crate) use handle;

/// The value behind a handle.
pub(crate) fn get<H: Handle>(handle: *const H) -> Answer<Arc<H::Value>> {
    H::table().get(handle as u64)
}

/// The value behind a handle. `None` if the handle is null.
pub(crate) fn get_if_any<H: Handle>(handle: *const H) -> Answer<Option<Arc<H::Value>>> {
    if handle.is_null() { Ok(None) } else { get(handle).map(Some) }
}

/// Creates a handle for a value.
pub(crate) fn new<H: Handle>(value: H::Value) -> Answer<*mut H> {
    Ok(H::table().add(value)? as *mut H)
}

/// Frees a handle and returns its value. `None` if the handle is null.
pub(crate) fn free<H: Handle>(handle: *mut H) -> Answer<Option<Arc<H::Value>>> {
    if handle.is_null() { Ok(None) } else { H::table().remove(handle as u64).map(Some) }
}

/// The values of one kind.
pub(crate) struct Table<T> {
    what: &'static str,
    kind: u64,
    most: u32,
    /// A place never moves, so threads access places without the lock of `free`.
    chunks: [OnceLock<Chunk<T>>; CHUNKS],
    free: Mutex<Free>,
}

type Chunk<T> = Box<[RwLock<Place<T>>]>;

struct Place<T> {
    generation: u64,
    value: Option<Arc<T>>,
}

struct Free {
    places: Vec<u32>,
    /// Places from this index on were never used.
    unused: u32,
}

impl<T> Table<T> {
    pub(crate) const fn new(what: &'static str, kind: u8) -> Self {
        assert!(kind > 0 && kind < 64);
        let free = Mutex::new(Free { places: Vec::new(), unused: 0 });
        Self {
            what,
            kind: kind as u64,
            most: MOST,
            chunks: [const { OnceLock::new() }; CHUNKS],
            free,
        }
    }

    fn add(&self, value: T) -> Answer<u64> {
        let value = Some(Arc::new(value));
        let index = self.free_place()?;
        let place = self.place(index).ok_or_else(|| self.stale())?;
        let mut place = place.write().unwrap_or_else(PoisonError::into_inner);
        place.value = value;
        let name = self.kind << (INDEX_BITS + GENERATION_BITS);
        Ok(name | place.generation << INDEX_BITS | u64::from(index))
    }

    fn free_place(&self) -> Answer<u32> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = free.places.pop() {
            return Ok(index);
        }
        if free.unused == self.most {
            let sentence =
                format!("the maximum of {} handles to {} exists already", self.most, self.what);
            return Err(Failure::new(peerway_status::TooManyHandles, sentence));
        }
        let index = free.unused;
        let (chunk, _) = whereabouts(index);
        self.chunks[chunk].get_or_init(|| {
            let places = 0..FIRST_CHUNK << chunk;
            places.map(|_| RwLock::new(Place { generation: 0, value: None })).collect()
        });
        free.unused += 1;
        Ok(index)
    }

    fn get(&self, handle: u64) -> Answer<Arc<T>> {
        if handle == 0 {
            let sentence = format!("the handle to {} is null", self.what);
            return Err(Failure::new(peerway_status::NullArgument, sentence));
        }
        let (place, generation) = self.find(handle)?;
        let place = place.read().unwrap_or_else(PoisonError::into_inner);
        let value = place.value.as_ref().filter(|_| place.generation == generation);
        value.cloned().ok_or_else(|| self.stale())
    }

    fn remove(&self, handle: u64) -> Answer<Arc<T>> {
        let (place, generation) = self.find(handle)?;
        let mut place = place.write().unwrap_or_else(PoisonError::into_inner);
        if place.generation != generation {
            return Err(self.stale());
        }
        let value = place.value.take().ok_or_else(|| self.stale())?;
        place.generation = (generation + 1) % GENERATIONS;
        drop(place);
        let index = handle as u32 & ((1 << INDEX_BITS) - 1);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).places.push(index);
        Ok(value)
    }

    fn find(&self, handle: u64) -> Answer<(&RwLock<Place<T>>, u64)> {
        let index = handle as u32 & ((1 << INDEX_BITS) - 1);
        let generation = handle >> INDEX_BITS & (GENERATIONS - 1);
        let of_this_kind = handle >> (INDEX_BITS + GENERATION_BITS) == self.kind;
        let place = self.place(index).filter(|_| of_this_kind);
        place.map(|place| (place, generation)).ok_or_else(|| self.stale())
    }

    fn place(&self, index: u32) -> Option<&RwLock<Place<T>>> {
        let (chunk, at) = whereabouts(index);
        self.chunks.get(chunk)?.get()?.get(at)
    }

    fn stale(&self) -> Failure {
        let sentence = format!("not a handle to {}: was it freed already?", self.what);
        Failure::new(peerway_status::BadHandle, sentence)
    }
}

/// The chunk of a place, and its index in the chunk.
fn whereabouts(index: u32) -> (usize, usize) {
    let nth = index / FIRST_CHUNK + 1;
    let chunk = nth.ilog2();
    (chunk as usize, (index - FIRST_CHUNK * ((1 << chunk) - 1)) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T>(answer: Answer<T>) -> peerway_status {
        answer.err().map_or(peerway_status::Ok, |failure| failure.status)
    }

    #[test]
    fn places_follow_one_another() {
        assert_eq!(whereabouts(0), (0, 0));
        assert_eq!(whereabouts(63), (0, 63));
        assert_eq!(whereabouts(64), (1, 0));
        assert_eq!(whereabouts(191), (1, 127));
        assert_eq!(whereabouts(192), (2, 0));
        assert_eq!(whereabouts(MOST - 1).0, CHUNKS - 1);
        assert_eq!(whereabouts(MOST).0, CHUNKS);
    }

    #[test]
    fn handles_are_found_until_they_are_freed_and_never_after() {
        let table = Table::new("a number", 5);
        let other = Table::<u32>::new("another", 6);
        let handles: Vec<u64> = (0..1000).map(|n| table.add(n).unwrap()).collect();
        for (n, handle) in handles.iter().enumerate() {
            assert_eq!(*table.get(*handle).unwrap(), n);
            assert_eq!(refused(other.get(*handle)), peerway_status::BadHandle);
        }
        let held = table.get(handles[7]).unwrap();
        assert_eq!(*table.remove(handles[7]).unwrap(), 7);
        assert_eq!(refused(table.get(handles[7])), peerway_status::BadHandle);
        assert_eq!(refused(table.remove(handles[7])), peerway_status::BadHandle);
        let again = table.add(4242).unwrap();
        assert_ne!(again, handles[7]);
        assert_eq!(
            again as u32,
            handles[7] as u32 ^ 1 << 24,
            "the same place, the next generation"
        );
        assert_eq!(refused(table.get(handles[7])), peerway_status::BadHandle);
        assert_eq!((*held, *table.get(again).unwrap()), (7, 4242));
        assert_eq!(refused(table.get(0)), peerway_status::NullArgument);
        for wild in [1, 0x7fff_1234_5678, u64::MAX, handles[0] | 0xff_ffff] {
            assert_eq!(refused(table.get(wild)), peerway_status::BadHandle);
        }
    }

    #[test]
    fn a_full_table_says_so_and_has_room_again() {
        let table = Table { most: 70, ..Table::new("a number", 9) };
        let handles: Vec<u64> = (0..70).map(|n| table.add(n).unwrap()).collect();
        let full = table.add(70).unwrap_err();
        assert_eq!(full.status, peerway_status::TooManyHandles);
        assert_eq!(full.sentence.unwrap(), "the maximum of 70 handles to a number exists already");
        table.remove(handles[3]).unwrap();
        assert_eq!(*table.get(table.add(71).unwrap()).unwrap(), 71);
        assert!(table.add(72).is_err());
    }

    #[test]
    fn threads_make_and_free_handles_at_once() {
        let table = Arc::new(Table::new("a number", 1));
        let shared = table.add(7usize).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let table = table.clone();
                std::thread::spawn(move || {
                    for n in 0..2000 {
                        let handle = table.add(thread * 10_000 + n).unwrap();
                        assert_eq!(*table.get(handle).unwrap(), thread * 10_000 + n);
                        assert_eq!(*table.get(shared).unwrap(), 7);
                        table.remove(handle).unwrap();
                        assert!(table.get(handle).is_err());
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(table.free.lock().unwrap().unused < 64, "places are not reused");
    }
}
