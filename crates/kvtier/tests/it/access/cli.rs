//! The commands that ask a server that is closed.

use std::process::{Command, Output};

use super::served::{Files, KVTIER, READER, Served, Setup};

fn kvtier(server: &Served, args: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(KVTIER)
        .args(args)
        .current_dir(server.files.0.path())
        .env_remove("KVTIER_TOKEN")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

#[test]
fn https_to_http_port_is_reported() {
    let server = Served::start(Setup::Open, &[]);
    let url = server.http.replace("http://", "https://");
    let message = complaint(&kvtier(&server, &["status", &url], &[]));
    assert!(
        message.contains("this port speaks http, not https"),
        "{message}"
    );
}

#[test]
fn ca_certificate_as_server_certificate_is_explained() {
    let files = Files::new();
    let mut authority = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    files.put("cert.pem", &authority.self_signed(&key).unwrap().pem());
    files.put("key.pem", &key.serialize_pem());
    let flags = ["--http-tls-cert", "cert.pem", "--http-tls-key", "key.pem"];
    let server = Served::start_in(files, Setup::Open, &flags, &[]);
    assert!(server.http.starts_with("https://"), "{}", server.http);
    let message = complaint(&kvtier(
        &server,
        &["status", &server.http, "--ca-cert", "cert.pem"],
        &[],
    ));
    assert!(
        message.contains("-addext basicConstraints=critical,CA:FALSE"),
        "{message}"
    );
}

#[test]
fn token_is_read_from_file_or_environment() {
    let server = Served::start(Setup::Tokens, &[]);
    let url = server.http.as_str();
    server.files.put("token", &format!("{READER}\n"));
    for command in [&["status"][..], &["quota", "list"]] {
        let message = complaint(&kvtier(&server, &[command, &[url]].concat(), &[]));
        assert!(
            message.contains("401, a token is needed") && message.contains("--token-file"),
            "{message}"
        );
    }
    let message = complaint(&kvtier(
        &server,
        &["status", url],
        &[("KVTIER_TOKEN", "wrong")],
    ));
    assert!(
        message.contains("401, that is no token known here"),
        "{message}"
    );
    for (more, variables) in [
        (&["--token-file", "token"][..], &[][..]),
        (&[], &[("KVTIER_TOKEN", READER)]),
        (&["--token-file", "token"], &[("KVTIER_TOKEN", "wrong")]),
    ] {
        let output = kvtier(&server, &[&["status", url], more].concat(), variables);
        assert!(output.status.success(), "{output:?}");
    }
    server.files.put("token", "two words\n");
    let message = complaint(&kvtier(
        &server,
        &["status", url, "--token-file", "token"],
        &[],
    ));
    assert!(
        message.contains("--token-file: that is not a token") && !message.contains("words"),
        "{message}"
    );
    // Probes carry none.
    assert!(
        kvtier(&server, &["ping", "--count", "1", url], &[])
            .status
            .success()
    );
}

#[test]
fn commands_trust_the_configured_certificate() {
    let server = Served::start(Setup::Tls, &[]);
    let url = server.http.as_str();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let variables = [("KVTIER_TOKEN", READER)];
    let message = complaint(&kvtier(&server, &["status", url], &variables));
    assert!(
        message.contains("is not trusted") && message.contains("--ca-cert"),
        "{message}"
    );
    let output = kvtier(
        &server,
        &["status", url, "--ca-cert", "cert.pem"],
        &variables,
    );
    assert!(output.status.success(), "{output:?}");
    let output = kvtier(
        &server,
        &["ping", "--count", "1", url, "--ca-cert", "cert.pem"],
        &[],
    );
    assert!(output.status.success(), "{output:?}");
    let message = complaint(&kvtier(
        &server,
        &["ping", url, "--ca-cert", "key.pem"],
        &[],
    ));
    assert!(
        message.contains("there is no certificate in it"),
        "{message}"
    );
    let plain = url.replace("https", "http");
    complaint(&kvtier(&server, &["ping", "--count", "1", &plain], &[]));
}
