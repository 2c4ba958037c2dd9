//! Credentials: those of the configuration, or the first that the usual chain has, renewed before they expire.
//!
//! The chain: environment, web identity, profile files, container, instance metadata. A profile of the configuration comes
//! first. The mutexes guard the credentials in use, and that one caller renews them at a time; the
//! first may be acquired inside the second.

mod profile;
mod remote;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;

use super::sign::Credentials;
use super::time;
use kvtier_l2::{ErrorKind, L2Error};

/// How long before their end credentials are renewed.
const RENEWED_BEFORE: u64 = 5 * 60;

/// How long a search without credentials stands for the next one.
const FAILURE_COUNTS: Duration = Duration::from_secs(1);

/// Pause after a renewal that failed, while the old credentials are valid.
const PAUSE: Duration = Duration::from_secs(10);

/// Returns the value of a variable.
type GetVariable = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Variables of the environment.
#[derive(Clone)]
pub(super) struct Variables(Arc<GetVariable>);

impl Variables {
    pub(super) fn of_process() -> Self {
        Self(Arc::new(|name| std::env::var(name).ok()))
    }

    /// The value of one that is not empty.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }
}

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Variables")
    }
}

/// Source of credentials.
pub(super) struct Provider {
    source: Source,
    current: Mutex<Option<Current>>,
    renewal: tokio::sync::Mutex<Option<(Instant, L2Error)>>,
}

enum Source {
    Fixed(Arc<Credentials>),
    Chain(Chain),
}

/// What the chain needs to know.
struct Chain {
    variables: Variables,
    profile: Option<String>,
    region: String,
}

#[derive(Clone)]
struct Current {
    credentials: Arc<Credentials>,
    /// Not before this after a renewal that failed.
    next_renewal: Option<Instant>,
}

impl Provider {
    pub(super) fn new(
        fixed: Option<Credentials>,
        profile: Option<String>,
        region: &str,
        variables: Variables,
    ) -> Self {
        let source = match fixed {
            Some(fixed) => Source::Fixed(Arc::new(fixed)),
            None => Source::Chain(Chain {
                profile,
                variables,
                region: region.to_owned(),
            }),
        };
        Self {
            source,
            current: Mutex::new(None),
            renewal: tokio::sync::Mutex::new(None),
        }
    }

    /// Returns credentials that are valid now.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if there are none.
    pub(super) async fn get(&self) -> Result<Arc<Credentials>, L2Error> {
        let chain = match &self.source {
            Source::Fixed(fixed) => return Ok(Arc::clone(fixed)),
            Source::Chain(chain) => chain,
        };
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        let mut last_failure = self.renewal.lock().await;
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        // Of those that waited for the same answer each would ask again, one after the other.
        if let Some((at, error)) = &*last_failure
            && at.elapsed() < FAILURE_COUNTS
        {
            return Err(error.clone());
        }
        match chain.find().await {
            Ok(found) => {
                let credentials = Arc::new(found);
                *self.current.lock() = Some(Current {
                    credentials: Arc::clone(&credentials),
                    next_renewal: None,
                });
                Ok(credentials)
            }
            Err(error) => {
                let mut current = self.current.lock();
                let valid = current.as_mut().filter(|current| {
                    let end = current.credentials.expires_at;
                    end.is_none_or(|end| end > time::now())
                });
                let Some(current) = valid else {
                    *last_failure = Some((Instant::now(), error.clone()));
                    return Err(error);
                };
                current.next_renewal = Some(Instant::now() + PAUSE);
                tracing::warn!(%error, "credentials were not renewed; using the old ones");
                Ok(Arc::clone(&current.credentials))
            }
        }
    }

    /// Makes the next call look for credentials again, as those in use were refused.
    pub(super) fn forget(&self) {
        *self.current.lock() = None;
    }

    /// The current ones if they need no renewal now.
    fn fresh(&self) -> Option<Arc<Credentials>> {
        let current = self.current.lock().clone()?;
        let end = current.credentials.expires_at;
        let is_fresh = end.is_none_or(|end| end > time::now() + RENEWED_BEFORE);
        let is_paused = current
            .next_renewal
            .is_some_and(|next| next > Instant::now());
        (is_fresh || is_paused).then_some(current.credentials)
    }
}

impl Chain {
    async fn find(&self) -> Result<Credentials, L2Error> {
        // A profile that was asked for by name has to have them.
        if let Some(name) = &self.profile {
            let found = profile::read(&self.variables, name).await?;
            return found.ok_or_else(|| refused(&format!("profile {name:?} has no access key")));
        }
        if let Some(found) = self.environment() {
            return Ok(found);
        }
        if let Some(found) = remote::web_identity(&self.variables, &self.region).await? {
            return Ok(found);
        }
        let named = self.variables.get("AWS_PROFILE");
        let name = named.as_deref().unwrap_or("default");
        if let Some(found) = profile::read(&self.variables, name).await? {
            return Ok(found);
        }
        if let Some(found) = remote::container(&self.variables).await? {
            return Ok(found);
        }
        if let Some(found) = remote::instance(&self.variables).await? {
            return Ok(found);
        }
        Err(refused(
            "no access key was found; give aws_access_key_id, or one in the environment, a profile, or a role",
        ))
    }

    fn environment(&self) -> Option<Credentials> {
        Some(Credentials {
            access_key_id: self.variables.get("AWS_ACCESS_KEY_ID")?,
            secret_access_key: self.variables.get("AWS_SECRET_ACCESS_KEY")?,
            session_token: self.variables.get("AWS_SESSION_TOKEN"),
            expires_at: None,
        })
    }
}

fn refused(what: &str) -> L2Error {
    L2Error::new(ErrorKind::Refused, what)
}
