//! How tenants are named, and how much is reported per tenant.

use std::path::{Path, PathBuf};

use clap::Args;
use kvtier_common::error::{Error, Result};
use kvtier_core::object_key::{SaltKey, TenantNames, check_cache_salt};

/// Sizes that a file with a secret may have, bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// The flags.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct TenantSettings {
    /// File with a secret of 16 to 4096 bytes. Hashes keyed with it replace cache salts in names in L2, in metrics and over
    /// HTTP; servers that share a directory need the same secret. LMCache cannot read such names [default: none, plain
    /// salts]
    #[arg(long, value_name = "FILE", help_heading = "Tenants")]
    pub hash_salts: Option<PathBuf>,
    /// Prefix that a frontend puts before tenants' names in salts, such as Dynamo's dynamo-cache-salt:. Quotas, /tenants and
    /// metrics then have the name alone, and @SALT for a salt without the prefix. Not with --hash-salts
    #[arg(
        long,
        value_name = "PREFIX",
        value_parser = prefix,
        default_value = "",
        hide_default_value = true,
        help_heading = "Tenants"
    )]
    pub tenant_prefix: String,
    /// Number of tenants with their own series in kvtier_tenant metrics, those with the most bytes; the rest is other.
    /// 0 to 1000; 0 leaves these metrics out
    #[arg(
        long,
        default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(0..=1000),
        help_heading = "Tenants"
    )]
    pub tenant_metrics: u16,
}

impl TenantSettings {
    /// Reads the secret, if salts are to be hashed.
    ///
    /// # Errors
    /// One line: a file that cannot be read, or has no secret in it, or names that hashes do not have.
    pub fn salt_key(&self) -> Result<Option<SaltKey>> {
        if self.hash_salts.is_some() && !self.tenant_prefix.is_empty() {
            return Err(Error::refused(
                "--tenant-prefix: not with --hash-salts, since hashes have no prefix; give one of them",
            ));
        }
        let read = |path: &PathBuf| read(path).map(|secret| SaltKey::new(&secret));
        self.hash_salts.as_ref().map(read).transpose()
    }

    /// The names of tenants.
    pub fn names(&self) -> TenantNames {
        TenantNames::new(&self.tenant_prefix)
    }

    /// Warning of the secret's file.
    pub(crate) fn warning(&self) -> Option<String> {
        let warning = secret_file_warning(self.hash_salts.as_ref()?)?;
        Some(format!("--hash-salts: {warning}"))
    }
}

/// Warning of a file with a secret that others than its owner may use.
pub fn secret_file_warning(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;

    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o077 != 0).then(|| {
        format!(
            "{} holds a secret and has mode {mode:04o}, which is not for its owner alone; 0600 is enough",
            path.display()
        )
    })
}

/// A prefix of salts.
fn prefix(text: &str) -> Result<String, String> {
    check_cache_salt(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// The secret in a file: all of it but white space at its end.
fn read(path: &Path) -> Result<Vec<u8>> {
    use std::io::Read as _;

    let failed = |error| Error::io(format!("--hash-salts: {}", path.display()), error);
    let mut secret = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    let most = *SECRET_BYTES.end() as u64 + 1;
    file.take(most).read_to_end(&mut secret).map_err(failed)?;
    secret.truncate(secret.trim_ascii_end().len());
    if !SECRET_BYTES.contains(&secret.len()) {
        return Err(Error::refused(format!(
            "--hash-salts: {} has {} bytes{}; allowed: a secret of {} to {} bytes, such as `openssl rand -hex 32` makes",
            path.display(),
            secret.len(),
            if secret.len() > *SECRET_BYTES.end() {
                " or more"
            } else {
                ""
            },
            SECRET_BYTES.start(),
            SECRET_BYTES.end(),
        )));
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(content: &[u8]) -> Result<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        std::fs::write(&path, content).unwrap();
        let settings = TenantSettings {
            hash_salts: Some(path),
            tenant_prefix: String::new(),
            tenant_metrics: 0,
        };
        Ok(settings.salt_key()?.unwrap().hashed("acme"))
    }

    #[test]
    fn the_end_of_the_line_is_no_part_of_a_secret() {
        let secret = b"0123456789abcdef";
        assert_eq!(key(b"0123456789abcdef\r\n"), key(secret));
        assert_ne!(key(b" 0123456789abcdef"), key(secret));
    }

    #[test]
    fn secret_that_others_may_read_is_warned_of() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for (mode, warning) in [
            (0o644, "has mode 0644"),
            (0o620, "has mode 0620"),
            (0o600, ""),
            (0o400, ""),
        ] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
            let config = crate::ServerConfig::from_flags(&["--hash-salts", path]).unwrap();
            let mut warnings = config.warnings();
            let found = warnings.find(|warning| warning.starts_with("--hash-salts: "));
            let found = found.unwrap_or_default();
            assert!(
                found.contains(warning) && found.is_empty() == warning.is_empty(),
                "{found}"
            );
        }
    }

    #[test]
    fn what_is_no_secret_is_refused_with_what_is() {
        for (content, told) in [
            (&b""[..], "has 0 bytes;"),
            (b"short\n", "has 5 bytes;"),
            (&[b'x'; 5000], "has 4097 bytes or more;"),
        ] {
            let error = key(content).unwrap_err().to_string();
            assert!(
                error.contains(told) && error.contains("16 to 4096"),
                "{error}"
            );
        }
        let settings = TenantSettings {
            hash_salts: Some("/nowhere/secret".into()),
            tenant_prefix: String::new(),
            tenant_metrics: 0,
        };
        let error = settings.salt_key().err().unwrap().to_string();
        assert!(error.contains("/nowhere/secret"));
    }
}
