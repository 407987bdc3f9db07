//! How the shared library is linked. It has the name that it is installed and found under: with the first number of the
//! version, which changes with the binary interface. It is never unloaded, because an endpoint's threads may still run when a program
//! that opened the library closes it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpeerway.so.{major}");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
