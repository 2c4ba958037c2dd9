//! Maps with named fields, as tables.

/// Reads a map into one variable per field. A field is required unless it has a default; unknown names are skipped.
macro_rules! read_fields {
    ($reader:expr, |$value:ident| { $($field:ident $(= $default:expr)?, $name:literal => $read:expr;)* }) => {
        $(let mut $field = read_fields!(@start $($default)?);)*
        $reader.map(|name, $value| {
            match name {
                $($name => $field = read_fields!(@found $read $(, $default)?),)*
                _ => $value.skip_unknown(name)?,
            }
            Ok(())
        })?;
        $(let $field = read_fields!(@end $field, $name $(, $default)?);)*
    };
    (@start) => { None };
    (@start $default:expr) => { $default };
    (@found $read:expr) => { Some($read) };
    (@found $read:expr, $default:expr) => { $read };
    (@end $field:ident, $name:literal) => { $crate::key::required($field, $name)? };
    (@end $field:ident, $name:literal, $default:expr) => { $field };
}

pub(crate) use read_fields;
