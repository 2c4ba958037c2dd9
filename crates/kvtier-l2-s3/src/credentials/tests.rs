//! Each source of the chain, from a service on loopback or a file.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};

use super::*;

/// A service that answers each request by the body for its first line, and keeps what it was asked.
struct Service {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Service {
    fn start(answers: Vec<(&'static str, String)>) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen, answers) =
                    (stream.unwrap(), Arc::clone(&seen), answers.clone());
                std::thread::spawn(move || {
                    let mut bytes = [0; 65536];
                    while let Ok(got @ 1..) = stream.read(&mut bytes) {
                        let request = String::from_utf8_lossy(&bytes[..got]).into_owned();
                        let found = answers.iter().find(|(start, _)| request.starts_with(start));
                        seen.lock().push(request.clone());
                        let (status, body) = found.map_or((404, ""), |(_, body)| (200, body));
                        let reply = format!(
                            "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}",
                            body.len()
                        );
                        stream.write_all(reply.as_bytes()).unwrap();
                    }
                });
            }
        });
        Self { port, asked }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

fn provider(profile: Option<&str>, variables: &[(&str, &str)]) -> Provider {
    let variables: HashMap<String, String> = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let variables = Variables(Arc::new(move |name| variables.get(name).cloned()));
    Provider::new(None, profile.map(str::to_owned), "us-east-1", variables)
}

fn keys(id: &str, expiration: &str) -> String {
    format!(
        r#"{{"Code":"Success","AccessKeyId":"{id}","SecretAccessKey":"s","Token":"t","Expiration":"{expiration}"}}"#
    )
}

const LATER: &str = "2100-01-01T00:00:00Z";

#[tokio::test]
async fn environment_comes_first_and_a_named_profile_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("credentials");
    std::fs::write(
        &file,
        "# a comment\n[default]\naws_access_key_id = one\naws_secret_access_key=1\n\n[other]\naws_access_key_id=two\n\
         aws_secret_access_key = 2\naws_session_token = t\n[role]\nrole_arn = arn\ns3 =\n  aws_access_key_id = no\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let of_files = ("AWS_SHARED_CREDENTIALS_FILE", file);
    let off = ("AWS_EC2_METADATA_DISABLED", "true");
    let both = [
        ("AWS_ACCESS_KEY_ID", "env"),
        ("AWS_SECRET_ACCESS_KEY", "e"),
        of_files,
        off,
    ];
    let id = async |provider: Provider| match provider.get().await {
        Ok(found) => found.access_key_id.clone(),
        Err(error) => format!("{:?} {error}", error.kind()),
    };
    assert_eq!(id(provider(None, &both)).await, "env");
    assert_eq!(id(provider(Some("other"), &both)).await, "two");
    assert_eq!(id(provider(None, &[of_files, off])).await, "one");
    assert_eq!(
        id(provider(None, &[of_files, off, ("AWS_PROFILE", "other")])).await,
        "two"
    );
    let refused = id(provider(Some("role"), &both)).await;
    assert!(
        refused.starts_with("Refused") && refused.contains("role_arn"),
        "{refused}"
    );
    let refused = id(provider(Some("absent"), &both)).await;
    assert!(refused.contains("absent"), "{refused}");
    let refused = id(provider(None, &[off])).await;
    assert!(refused.contains("give aws_access_key_id"), "{refused}");
}

#[tokio::test]
async fn web_identity_is_exchanged_for_keys() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "to ken\n").unwrap();
    let body = format!(
        "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><AssumeRoleWithWebIdentityResult>\
         <Credentials><AccessKeyId>web</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>\
         <Expiration>{LATER}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    );
    let service = Service::start(vec![("POST / ", body)]);
    let provider = provider(
        None,
        &[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", file.to_str().unwrap()),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/x"),
            ("AWS_ENDPOINT_URL_STS", &service.url()),
        ],
    );
    let found = provider.get().await.unwrap();
    assert_eq!(
        (&*found.access_key_id, found.session_token.as_deref()),
        ("web", Some("t"))
    );
    provider.get().await.unwrap();
    let asked = service.asked.lock().join("");
    assert_eq!(asked.matches("POST / ").count(), 1, "{asked}");
    assert!(
        asked.contains("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx") && asked.contains("=to%20ken"),
        "{asked}"
    );
}

#[tokio::test]
async fn container_and_instance_are_asked_with_their_tokens() {
    let service = Service::start(vec![
        ("GET /container?a=b ", keys("container", LATER)),
        ("PUT /latest/api/token ", "imds-token".into()),
        (
            "GET /latest/meta-data/iam/security-credentials/ ",
            "my-role\n".into(),
        ),
        (
            "GET /latest/meta-data/iam/security-credentials/my-role ",
            keys("instance", LATER),
        ),
    ]);
    let url = format!("{}/container?a=b", service.url());
    let container = provider(
        None,
        &[
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &url),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "secret-token"),
        ],
    );
    assert_eq!(container.get().await.unwrap().access_key_id, "container");
    assert!(service.asked.lock()[0].contains("authorization: secret-token"));
    let instance = provider(
        None,
        &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &service.url())],
    );
    assert_eq!(instance.get().await.unwrap().access_key_id, "instance");
    assert!(service.asked.lock()[3].contains("x-aws-ec2-metadata-token: imds-token"));
    let far = provider(
        None,
        &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://192.0.2.1/")],
    );
    let refused = far.get().await.unwrap_err().to_string();
    assert!(refused.contains("loopback"), "{refused}");
}

#[tokio::test]
async fn keys_are_renewed_before_they_expire_and_old_ones_used_while_that_fails() {
    let soon = |seconds: u64| {
        let text = time::compact(time::now() + seconds);
        format!(
            "{}-{}-{}T{}:{}:{}Z",
            &text[..4],
            &text[4..6],
            &text[6..8],
            &text[9..11],
            &text[11..13],
            &text[13..15]
        )
    };
    let service = Service::start(vec![
        ("GET /soon ", keys("soon", &soon(60))),
        ("GET /past ", keys("past", &soon(0))),
    ]);
    let asked = || service.asked.lock().len();
    let of = |path: &str| {
        let url = format!("{}{path}", service.url());
        provider(
            None,
            &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", url.as_str())],
        )
    };
    let soon = of("/soon");
    for number in 1..4 {
        assert_eq!(soon.get().await.unwrap().access_key_id, "soon");
        assert_eq!(asked(), number);
    }
    // The service has nothing any more.
    let mut gone = of("/gone");
    gone.current = Mutex::new(soon.current.lock().clone());
    for _ in 0..3 {
        assert_eq!(gone.get().await.unwrap().access_key_id, "soon");
        assert_eq!(asked(), 4);
    }
    gone.forget();
    assert_eq!(gone.get().await.unwrap_err().kind(), ErrorKind::Refused);
}
