//! Credentials from services: a web identity by STS, a container's, an instance's.

use std::time::Duration;

use hyper::body::Bytes;
use serde::Deserialize;

use super::super::content::Content;
use super::super::http::{Http, Outbound, Server};
use super::super::{name, time, xml};
use super::{Credentials, Variables, refused};
use kvtier_l2::net::ClientTls;
use kvtier_l2::{ErrorKind, L2Error};

/// Time for a connection and for each answer. Without an instance's service there is nothing at its address.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Longest answer.
const MAX_ANSWER: usize = 64 << 10;

/// The address of a container's service, if its path is given without one.
const CONTAINER: &str = "http://169.254.170.2";

/// Addresses of a container's service that may be asked without TLS, beside loopback ones.
const CONTAINERS: &[&str] = &["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// The address of an instance's service.
const INSTANCE: &str = "http://169.254.169.254";

/// Keys as a container's and an instance's service answer.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CredentialsAnswer {
    access_key_id: String,
    secret_access_key: String,
    token: Option<String>,
    expiration: Option<String>,
}

/// A service at a URL.
struct Service {
    http: Http,
    authority: String,
    /// Path and query.
    target: String,
    host: String,
    is_plain: bool,
}

impl Service {
    fn of(url: &str) -> Option<Self> {
        let uri: hyper::Uri = url.parse().ok()?;
        let is_plain = match uri.scheme_str()? {
            "http" => true,
            "https" => false,
            _ => return None,
        };
        let host = uri.host()?.trim_matches(['[', ']']).to_owned();
        let server = Server {
            port: uri.port_u16().unwrap_or(if is_plain { 80 } else { 443 }),
            host: host.clone(),
            tls: (!is_plain).then(ClientTls::default),
        };
        let authority = uri.authority()?.as_str();
        Some(Self {
            http: Http::new(server, TIMEOUT, TIMEOUT),
            authority: authority.rsplit('@').next()?.to_owned(),
            target: uri.path_and_query()?.as_str().to_owned(),
            host,
            is_plain,
        })
    }

    /// The body of the answer to a request.
    async fn ask(
        &self,
        method: &'static str,
        target: &str,
        mut headers: Vec<(&'static str, String)>,
        body: String,
    ) -> Result<Vec<u8>, L2Error> {
        headers.push(("host", self.authority.clone()));
        let request = Outbound {
            method,
            target: target.to_owned(),
            headers,
            content: Content::Bytes(Bytes::from(body)),
            is_idempotent: true,
        };
        let response = self.http.send(&request).await?;
        let status = response.status();
        let body = response.whole(MAX_ANSWER).await?;
        match status {
            200..300 => Ok(body),
            429 | 500.. => Err(self.error(ErrorKind::Unavailable, &format!("status {status}"))),
            _ => Err(self.error(ErrorKind::Refused, &format!("status {status}"))),
        }
    }

    fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        L2Error::new(
            kind,
            format!("service of access keys at {}: {what}", self.authority),
        )
    }

    fn read(&self, body: &[u8]) -> Result<Credentials, L2Error> {
        // The parser's error may quote the body.
        let answer: CredentialsAnswer = serde_json::from_slice(body)
            .map_err(|_| self.error(ErrorKind::Refused, "the answer has no keys"))?;
        let end = match answer.expiration.as_deref().map(time::parse) {
            None => None,
            Some(Some(end)) => Some(end),
            Some(None) => return Err(self.error(ErrorKind::Refused, "when do the keys expire?")),
        };
        Ok(Credentials {
            access_key_id: answer.access_key_id,
            secret_access_key: answer.secret_access_key,
            session_token: answer.token,
            expires_at: end,
        })
    }
}

async fn file(path: String) -> Result<String, L2Error> {
    let shown = path.clone();
    let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await;
    let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let text = read.map_err(|error| refused(&format!("{shown}: {error}")))?;
    Ok(text.trim().to_owned())
}

/// A role that is assumed with a token in a file, as in Kubernetes.
pub(super) async fn web_identity(
    variables: &Variables,
    region: &str,
) -> Result<Option<Credentials>, L2Error> {
    let (Some(path), Some(role)) = (
        variables.get("AWS_WEB_IDENTITY_TOKEN_FILE"),
        variables.get("AWS_ROLE_ARN"),
    ) else {
        return Ok(None);
    };
    let session = variables.get("AWS_ROLE_SESSION_NAME");
    let token = file(path).await?;
    let url = variables
        .get("AWS_ENDPOINT_URL_STS")
        .unwrap_or_else(|| format!("https://sts.{region}.amazonaws.com"));
    let service = Service::of(&url).ok_or_else(|| refused("AWS_ENDPOINT_URL_STS: not a URL"))?;
    let body = format!(
        "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn={}&RoleSessionName={}&WebIdentityToken={}",
        name::quoted_in_query(&role),
        name::quoted_in_query(session.as_deref().unwrap_or("kvtier")),
        name::quoted_in_query(&token),
    );
    let form = "application/x-www-form-urlencoded".to_owned();
    let headers = vec![
        ("content-type", form),
        ("content-length", body.len().to_string()),
    ];
    let answer = service.ask("POST", "/", headers, body).await?;
    let read = xml::assumed_role(&answer);
    read.map(Some)
        .map_err(|_| service.error(ErrorKind::Refused, "the answer has no keys"))
}

/// Credentials of a container: those of ECS and of EKS.
pub(super) async fn container(variables: &Variables) -> Result<Option<Credentials>, L2Error> {
    let relative = variables.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    let full = variables.get("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    let Some(url) = relative.map(|path| format!("{CONTAINER}{path}")).or(full) else {
        return Ok(None);
    };
    let service = Service::of(&url)
        .ok_or_else(|| refused("AWS_CONTAINER_CREDENTIALS_FULL_URI: not a URL"))?;
    let address = service.host.parse::<std::net::IpAddr>();
    let is_near = CONTAINERS.contains(&service.host.as_str())
        || service.host == "localhost"
        || address.is_ok_and(|address| address.is_loopback());
    if service.is_plain && !is_near {
        let what = "AWS_CONTAINER_CREDENTIALS_FULL_URI: a host that is asked without TLS has to be loopback or a container's";
        return Err(refused(what));
    }
    let token = match variables.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") {
        Some(path) => Some(file(path).await?),
        None => variables.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
    };
    let headers = token.map(|token| ("authorization", token));
    let headers = headers.into_iter().collect();
    let answer = service
        .ask("GET", &service.target, headers, String::new())
        .await?;
    service.read(&answer).map(Some)
}

/// Credentials of an instance's role, by version 2 of its metadata service. Without the service there are none.
pub(super) async fn instance(variables: &Variables) -> Result<Option<Credentials>, L2Error> {
    const ROLES: &str = "/latest/meta-data/iam/security-credentials/";
    let is_off = variables.get("AWS_EC2_METADATA_DISABLED");
    if is_off.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(None);
    }
    let url = variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    let service = Service::of(url.as_deref().unwrap_or(INSTANCE))
        .ok_or_else(|| refused("AWS_EC2_METADATA_SERVICE_ENDPOINT: not a URL"))?;
    let life = vec![
        ("x-aws-ec2-metadata-token-ttl-seconds", "21600".to_owned()),
        ("content-length", "0".to_owned()),
    ];
    let Ok(token) = service
        .ask("PUT", "/latest/api/token", life, String::new())
        .await
    else {
        return Ok(None);
    };
    let token = String::from_utf8(token)
        .map_err(|_| service.error(ErrorKind::Refused, "the token is not text"))?;
    let headers = || vec![("x-aws-ec2-metadata-token", token.clone())];
    let role = service.ask("GET", ROLES, headers(), String::new()).await?;
    let role = String::from_utf8_lossy(&role);
    let role = role.lines().next().unwrap_or_default().trim();
    if role.is_empty() {
        return Ok(None);
    }
    let target = format!("{ROLES}{}", name::quoted(role));
    let answer = service
        .ask("GET", &target, headers(), String::new())
        .await?;
    service.read(&answer).map(Some)
}
