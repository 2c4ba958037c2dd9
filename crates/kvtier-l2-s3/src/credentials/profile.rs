//! Profiles in the files of the AWS tools: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::HashMap;
use std::path::PathBuf;

use super::{Credentials, Variables, refused};
use kvtier_l2::L2Error;

/// Longest file that is read.
const MAX_FILE: u64 = 1 << 20;

/// Returns the keys of a profile, `None` without the profile.
///
/// # Errors
/// If the profile has another source of credentials than keys, or a file cannot be read.
pub(super) async fn read(
    variables: &Variables,
    name: &str,
) -> Result<Option<Credentials>, L2Error> {
    let path = |variable: &str, file: &str| {
        let given = variables.get(variable).map(PathBuf::from);
        given.or_else(|| {
            Some(
                PathBuf::from(variables.get("HOME")?)
                    .join(".aws")
                    .join(file),
            )
        })
    };
    let files = [
        path("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        path("AWS_CONFIG_FILE", "config"),
    ];
    let mut fields = HashMap::new();
    for file in files.into_iter().flatten() {
        let text = match bounded(&file).await {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(refused(&format!("{}: {error}", file.display()))),
        };
        for (field, value) in section(&text, name) {
            // The first file comes first.
            fields.entry(field.to_owned()).or_insert(value.to_owned());
        }
    }
    let mut take = |field: &str| fields.remove(field).filter(|value| !value.is_empty());
    let keys = take("aws_access_key_id").zip(take("aws_secret_access_key"));
    let Some((access_key_id, secret_access_key)) = keys else {
        let other = [
            "role_arn",
            "sso_session",
            "sso_start_url",
            "credential_process",
        ];
        if let Some(field) = other.into_iter().find(|field| fields.contains_key(*field)) {
            let what = format!(
                "profile {name:?}: {field} is not supported; give a profile with aws_access_key_id, or variables of the environment"
            );
            return Err(refused(&what));
        }
        return Ok(None);
    };
    Ok(Some(Credentials {
        access_key_id,
        secret_access_key,
        session_token: take("aws_session_token"),
        // They may be replaced by another program.
        expires_at: None,
    }))
}

async fn bounded(path: &std::path::Path) -> std::io::Result<String> {
    let path = path.to_owned();
    let read = move || {
        use std::io::Read as _;
        let mut text = String::new();
        let file = std::fs::File::open(path)?;
        file.take(MAX_FILE).read_to_string(&mut text)?;
        Ok(text)
    };
    tokio::task::spawn_blocking(read)
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
}

/// The fields of `[name]` or `[profile name]`. Fields of fields, which are indented, are left out.
fn section<'a>(text: &'a str, name: &str) -> Vec<(&'a str, &'a str)> {
    let (mut is_in, mut found) = (false, Vec::new());
    for line in text.lines() {
        if line.starts_with([' ', '\t', '#', ';']) {
            continue;
        }
        if let Some(header) = line
            .trim()
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            let header = header.trim();
            let profile = header.strip_prefix("profile").map_or(header, str::trim);
            is_in = header == name || profile == name;
        } else if is_in && let Some((field, value)) = line.split_once('=') {
            found.push((field.trim(), value.trim()));
        }
    }
    found
}
