//! Tables of the functions that a library exports.

/// Declares a table of function pointers, named and typed as in C, and the function that fills it.
/// `resolve` refuses a library that lacks a required function and names that function. An optional
/// function that the library lacks is `None`.
macro_rules! symbol_table {
    (
        $(#[$meta:meta])*
        pub struct $table:ident {
            required { $( fn $name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?; )* }
            optional { $( fn $opt:ident($($opt_arg:ty),* $(,)?) $(-> $opt_ret:ty)?; )* }
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[allow(missing_docs)]
        pub struct $table {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?, )*
            $( pub $opt: Option<unsafe extern "C" fn($($opt_arg),*) $(-> $opt_ret)?>, )*
        }

        impl $table {
            /// Fills the table from a library of the matching kind.
            #[allow(non_snake_case, reason = "C names")]
            fn resolve(library: &$crate::probe::Mapped) -> Result<Self, String> {
                $( let $name = library.require($crate::symbols::c_name!($name))?; )*
                $( let $opt = library.symbol($crate::symbols::c_name!($opt)); )*
                Ok(Self {
                    // SAFETY: the address comes from the library's symbol of this name. The type is
                    // that of the vendor's header, which is stable: a changed type would change the
                    // soname.
                    $( $name: unsafe { std::mem::transmute::<
                        *mut std::ffi::c_void,
                        unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                    >($name) }, )*
                    // SAFETY: as above.
                    $( $opt: $opt.map(|address| unsafe { std::mem::transmute::<
                        *mut std::ffi::c_void,
                        unsafe extern "C" fn($($opt_arg),*) $(-> $opt_ret)?,
                    >(address) }), )*
                })
            }
        }
    };
}

/// An identifier as a C string.
macro_rules! c_name {
    ($name:ident) => {{
        const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
            concat!(stringify!($name), "\0").as_bytes(),
        ) {
            Ok(name) => name,
            Err(_) => unreachable!(),
        };
        NAME
    }};
}

pub(crate) use {c_name, symbol_table};
