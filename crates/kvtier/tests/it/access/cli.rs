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
    let told = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(told.lines().count(), 1, "{told}");
    told
}

#[test]
fn https_to_a_port_that_speaks_http_is_told_so() {
    let server = Served::start(Setup::Open, &[]);
    let url = server.http.replace("http://", "https://");
    let told = complaint(&kvtier(&server, &["status", &url], &[]));
    assert!(told.contains("this port speaks http, not https"), "{told}");
}

#[test]
fn a_certificate_of_an_authority_is_told_with_what_to_do() {
    let files = Files::new();
    let mut authority = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    files.put("cert.pem", &authority.self_signed(&key).unwrap().pem());
    files.put("key.pem", &key.serialize_pem());
    let flags = ["--http-tls-cert", "cert.pem", "--http-tls-key", "key.pem"];
    let server = Served::start_in(files, Setup::Open, &flags, &[]);
    assert!(server.http.starts_with("https://"), "{}", server.http);
    let told = complaint(&kvtier(
        &server,
        &["status", &server.http, "--ca-cert", "cert.pem"],
        &[],
    ));
    assert!(
        told.contains("-addext basicConstraints=critical,CA:FALSE"),
        "{told}"
    );
}

#[test]
fn commands_take_a_token_from_a_file_or_the_environment() {
    let server = Served::start(Setup::Tokens, &[]);
    let url = server.http.as_str();
    server.files.put("token", &format!("{READER}\n"));
    for command in [&["status"][..], &["quota", "list"]] {
        let told = complaint(&kvtier(&server, &[command, &[url]].concat(), &[]));
        assert!(
            told.contains("401, a token is needed") && told.contains("--token-file"),
            "{told}"
        );
    }
    let told = complaint(&kvtier(
        &server,
        &["status", url],
        &[("KVTIER_TOKEN", "wrong")],
    ));
    assert!(told.contains("401, that is no token known here"), "{told}");
    for (more, variables) in [
        (&["--token-file", "token"][..], &[][..]),
        (&[], &[("KVTIER_TOKEN", READER)]),
        (&["--token-file", "token"], &[("KVTIER_TOKEN", "wrong")]),
    ] {
        let output = kvtier(&server, &[&["status", url], more].concat(), variables);
        assert!(output.status.success(), "{output:?}");
    }
    server.files.put("token", "two words\n");
    let told = complaint(&kvtier(
        &server,
        &["status", url, "--token-file", "token"],
        &[],
    ));
    assert!(
        told.contains("--token-file: that is not a token") && !told.contains("words"),
        "{told}"
    );
    // Probes carry none.
    assert!(
        kvtier(&server, &["ping", "--count", "1", url], &[])
            .status
            .success()
    );
}

#[test]
fn commands_trust_the_certificate_they_are_told_to() {
    let server = Served::start(Setup::Tls, &[]);
    let url = server.http.as_str();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let variables = [("KVTIER_TOKEN", READER)];
    let told = complaint(&kvtier(&server, &["status", url], &variables));
    assert!(
        told.contains("is not trusted") && told.contains("--ca-cert"),
        "{told}"
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
    let told = complaint(&kvtier(
        &server,
        &["ping", url, "--ca-cert", "key.pem"],
        &[],
    ));
    assert!(told.contains("there is no certificate in it"), "{told}");
    let plain = url.replace("https", "http");
    complaint(&kvtier(&server, &["ping", "--count", "1", &plain], &[]));
}
