//! The library stays once it is loaded, as libcuda does: a stream's thread may still be on its way out
//! when the program closes the library, and would return into nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
