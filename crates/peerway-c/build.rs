//! Link options of the shared library. Its soname contains the major version, which changes with
//! the binary interface. The library is never unloaded (`nodelete`), because an endpoint's threads
//! may still run after a program calls `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpeerway.so.{major}");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
