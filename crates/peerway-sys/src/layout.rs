//! C structures and constants, declared once and checked against the C compiler.
//!
//! [`c_types!`] and [`c_constants!`] declare the items of a vendor's header under the header's
//! names, so the vendor's manual pages are the documentation. In tests, the same macros list every
//! declared structure, field and value. The test at the end of this file prints the same list from
//! C with the vendor's header and compares. A declared field cannot escape the comparison.
//!
//! Headers grow. Each declaration says how later headers may change the structure. `Exact`
//! structures never change. `Prefix` structures gain fields at the end: their callers pass a size,
//! or the library allocates them. `Tail` structures gain fields at the front. `newer` marks items
//! that older headers lack. `ours` marks padding that no header names.

/// Declares `#[repr(C)]` structures and unions with public fields.
macro_rules! c_types {
    ($(
        $(#[$meta:meta])*
        $growth:ident $kind:ident $name:ident $(= $c:literal)? {
            $( $(#[$field_meta:meta])* $field:ident $($presence:ident)? $(= $c_field:literal)? : $ty:ty ),*
            $(,)?
        }
    )*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            #[allow(non_camel_case_types, non_snake_case)]
            pub $kind $name {
                $( $(#[$field_meta])* pub $field: $ty, )*
            }

            impl $name {
                /// A value with every byte zero, as after `memset`.
                pub const fn zeroed() -> Self {
                    // SAFETY: types declared with this macro contain only integers, raw pointers,
                    // optional function pointers, pthread objects and other such types. Zero is a
                    // valid value for all of them.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*

        #[cfg(test)]
        pub(crate) const TYPES: &[$crate::layout::CType] = &[ $(
            $crate::layout::CType {
                c: $crate::layout::c_name!($kind $name $($c)?),
                growth: $crate::layout::Growth::$growth,
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[ $(
                    $crate::layout::CField {
                        c: $crate::layout::c_name!($field $($c_field)?),
                        presence: $crate::layout::presence!($($presence)?),
                        offset: std::mem::offset_of!($name, $field),
                        size: size_of::<$ty>(),
                    },
                )* ],
            },
        )* ];
    };
}

/// Declares constants under their C names.
macro_rules! c_constants {
    ($( $(#[$meta:meta])* $name:ident $($presence:ident)? : $ty:ty = $value:expr; )*) => {
        $( $(#[$meta])* pub const $name: $ty = $value; )*

        #[cfg(test)]
        pub(crate) const CONSTANTS: &[$crate::layout::CConstant] = &[ $(
            $crate::layout::CConstant {
                c: stringify!($name),
                presence: $crate::layout::presence!($($presence)?),
                value: $name as i64,
            },
        )* ];
    };
}

/// The name in C: the given one, or the name in Rust.
#[cfg(test)]
macro_rules! c_name {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $c:literal) => {
        $c
    };
    ($kind:ident $name:ident) => {
        concat!(stringify!($kind), " ", stringify!($name))
    };
    ($kind:ident $name:ident $c:literal) => {
        $c
    };
}

#[cfg(test)]
macro_rules! presence {
    () => {
        $crate::layout::Presence::Always
    };
    (newer) => {
        $crate::layout::Presence::Newer
    };
    (ours) => {
        $crate::layout::Presence::Ours
    };
}

pub(crate) use {c_constants, c_types};
#[cfg(test)]
pub(crate) use {c_name, presence};

/// A structure with its layout in Rust.
#[cfg(test)]
pub(crate) struct CType {
    /// The type in C: a name, or an expression for a type without a name.
    pub(crate) c: &'static str,
    pub(crate) growth: Growth,
    pub(crate) size: usize,
    pub(crate) align: usize,
    pub(crate) fields: &'static [CField],
}

#[cfg(test)]
pub(crate) struct CField {
    pub(crate) c: &'static str,
    pub(crate) presence: Presence,
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

#[cfg(test)]
pub(crate) struct CConstant {
    pub(crate) c: &'static str,
    pub(crate) presence: Presence,
    pub(crate) value: i64,
}

/// How a later header may change a structure.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Growth {
    /// It does not change.
    Exact,
    /// It gains fields at the end.
    Prefix,
    /// It gains fields at the front. The test compares distances from the end.
    Tail,
}

/// The headers that have an item.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Presence {
    /// All supported headers.
    Always,
    /// Only headers newer than the oldest supported one.
    Newer,
    /// No header: the item names padding of the C structure.
    Ours,
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::{cuda, efadv, verbs};

    /// The items to compare, and their headers.
    struct Headers {
        types: &'static [&'static [CType]],
        constants: &'static [&'static [CConstant]],
        includes: &'static str,
        /// The include directory, if the compiler does not search it by default.
        at: Option<String>,
    }

    impl Headers {
        fn flags(&self) -> Vec<String> {
            self.at.iter().map(|at| format!("-I{at}")).collect()
        }

        /// Checks that the compiler finds the headers. The error says why not.
        fn try_them(&self) -> Result<(), String> {
            let source = format!("{}int unused;\n", self.includes);
            cc(&source, &self.flags(), &["-fsyntax-only"])
        }
    }

    const RDMA_TYPES: &[&[CType]] = &[
        verbs::ffi::device::TYPES,
        verbs::ffi::context::TYPES,
        verbs::ffi::memory::TYPES,
        verbs::ffi::completion::TYPES,
        verbs::ffi::queue_pair::TYPES,
        verbs::ffi::work::TYPES,
        verbs::ffi::extended::TYPES,
        efadv::ffi::TYPES,
    ];

    const RDMA: Headers = Headers {
        types: RDMA_TYPES,
        constants: &[verbs::ffi::constants::CONSTANTS, efadv::ffi::CONSTANTS],
        includes: "#include <stddef.h>\n#include <stdio.h>\n\
            #include <infiniband/verbs.h>\n#include <infiniband/efadv.h>\n",
        at: None,
    };

    mod needs_rdma_headers {
        use super::*;

        #[test]
        #[ignore = "probes for the headers of rdma-core"]
        fn probe() {
            RDMA.try_them().expect("the headers of rdma-core are not installed");
        }

        #[test]
        #[ignore = "needs the headers of rdma-core (libibverbs-dev): cargo xtask test --only test"]
        fn rust_and_the_rdma_core_headers_agree_on_every_size_offset_and_value() {
            compare(&RDMA);
        }
    }

    mod needs_cuda_header {
        use super::*;

        /// `cargo xtask test` downloads the header and sets the variable.
        fn cuda() -> Headers {
            Headers {
                types: &[cuda::ffi::TYPES],
                constants: &[cuda::ffi::CONSTANTS],
                includes: "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n",
                at: std::env::var("PEERWAY_TEST_CUDA_INCLUDE").ok(),
            }
        }

        #[test]
        #[ignore = "probes for cuda.h"]
        fn probe() {
            cuda().try_them().expect("cuda.h was not found");
        }

        #[test]
        #[ignore = "needs cuda.h, in PEERWAY_TEST_CUDA_INCLUDE: cargo xtask test --only test"]
        fn rust_and_the_cuda_header_agree_on_every_size_offset_and_value() {
            compare(&cuda());
        }
    }

    fn compare(headers: &Headers) {
        headers.try_them().unwrap();
        let Headers { types, constants, includes, .. } = headers;
        let flags = headers.flags();
        let compiles = |source: &str| cc(source, &flags, &["-fsyntax-only"]);
        let mut older = Vec::new();
        let mut here = |presence: Presence, what: String, probe: String| match presence {
            Presence::Always => true,
            Presence::Ours => false,
            Presence::Newer => {
                let here = compiles(&format!("{includes}int probe = (int)({probe});\n")).is_ok();
                if !here {
                    older.push(what);
                }
                here
            }
        };

        let mut expected = HashMap::new();
        let mut body = String::new();
        for ty in types.iter().copied().flatten() {
            let c = ty.c;
            print(&mut body, &format!("sizeof {c}"), &format!("sizeof({c})"));
            expected.insert(format!("sizeof {c}"), (ty.growth, ty.size as i64));
            print(&mut body, &format!("alignof {c}"), &format!("_Alignof({c})"));
            expected.insert(format!("alignof {c}"), (Growth::Exact, ty.align as i64));
            for field in ty.fields {
                let what = format!("{c}.{}", field.c);
                let size = format!("sizeof((({c} *)0)->{})", field.c);
                if !here(field.presence, what.clone(), size.clone()) {
                    continue;
                }
                let (place, at) = match ty.growth {
                    Growth::Tail => (
                        format!("sizeof({c}) - offsetof({c}, {})", field.c),
                        ty.size - field.offset,
                    ),
                    _ => (format!("offsetof({c}, {})", field.c), field.offset),
                };
                print(&mut body, &format!("place {what}"), &place);
                expected.insert(format!("place {what}"), (Growth::Exact, at as i64));
                print(&mut body, &format!("size {what}"), &size);
                expected.insert(format!("size {what}"), (Growth::Exact, field.size as i64));
            }
        }
        for constant in constants.iter().copied().flatten() {
            let c = constant.c;
            if here(constant.presence, c.to_owned(), c.to_owned()) {
                print(&mut body, &format!("value {c}"), c);
                expected.insert(format!("value {c}"), (Growth::Exact, constant.value));
            }
        }

        let program = format!("{includes}int main(void) {{\n{body}return 0;\n}}\n");
        let printed =
            run(&program, &flags).expect("the program of sizes and offsets compiles and runs");
        let mut wrong = Vec::new();
        for line in printed.lines() {
            let (what, value) = line.split_once('\t').expect("a tab in every line");
            let value: i64 = value.parse().expect("a number after the tab");
            let (growth, ours) = expected.remove(what).expect("a requested item");
            let agrees = match growth {
                Growth::Exact => value == ours,
                Growth::Prefix | Growth::Tail => value >= ours,
            };
            if !agrees {
                wrong.push(format!("{what}: {value} in C, {ours} in Rust"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(expected.is_empty(), "C did not print {:?}", expected.keys());
        eprintln!("compared {} numbers; not in these headers: {older:?}", printed.lines().count());
    }

    fn print(body: &mut String, what: &str, value: &str) {
        writeln!(body, "printf(\"%s\\t%lld\\n\", \"{what}\", (long long)({value}));")
            .expect("writing to a string");
    }

    fn run(source: &str, flags: &[String]) -> Result<String, String> {
        let thread = std::thread::current().id();
        let name = format!("peerway-layout-{}-{thread:?}", std::process::id());
        let program = std::env::temp_dir().join(name);
        let result = cc(source, flags, &["-o", path(&program)]).and_then(|()| {
            let output = Command::new(&program).output().map_err(|error| error.to_string())?;
            String::from_utf8(output.stdout).map_err(|error| error.to_string())
        });
        // The program may not exist if the compiler failed.
        let _ = std::fs::remove_file(&program);
        result
    }

    fn path(path: &Path) -> &str {
        path.to_str().expect("a temporary directory with a plain name")
    }

    /// Compiles a translation unit. The error is the compiler's first error line.
    fn cc(source: &str, flags: &[String], arguments: &[&str]) -> Result<(), String> {
        let mut compiler = Command::new("cc")
            .args(["-x", "c", "-"])
            .args(flags)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run cc: {error}"))?;
        let mut input = compiler.stdin.take().expect("a piped input");
        input.write_all(source.as_bytes()).map_err(|error| error.to_string())?;
        drop(input);
        let output = compiler.wait_with_output().map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        Err(words.lines().find(|line| line.contains("error")).unwrap_or("cc failed").to_owned())
    }
}
