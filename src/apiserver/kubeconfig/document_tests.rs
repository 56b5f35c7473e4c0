#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use super::super::{Loaded, load, server_of};
use super::*;

const HEAD: &str = "\
current-context: node
contexts: [{name: node, context: {cluster: here, user: node}}]
";

fn written(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubelet.conf");
    fs::write(&path, format!("{HEAD}{text}")).unwrap();
    (dir, path)
}

fn loaded(text: &str) -> Loaded {
    let (_dir, path) = written(text);
    load(&path, None).unwrap()
}

#[test]
fn an_empty_path_is_none() {
    let loaded = loaded(
        r#"
clusters:
- name: here
  cluster: {server: "https://api:6443", certificate-authority: "", insecure-skip-tls-verify: true}
users:
- name: node
  user: {client-certificate: "", client-key: "", tokenFile: "", token: t, as: ""}
"#,
    );
    assert!(loaded.config.accept_invalid_certs && loaded.config.root_cert.is_none());
    let auth = &loaded.config.auth_info;
    assert!(auth.client_certificate.is_none() && auth.client_key.is_none());
    assert!(auth.token.is_some() && auth.impersonate.is_none());
    assert_eq!(loaded.files.len(), 1, "{:?}", loaded.files);
}

#[test]
fn the_last_of_a_key_given_twice_counts_and_null_is_not_given() {
    let loaded = loaded(
        "
clusters:
- name: here
  cluster: {server: 'https://old:6443', server: 'https://api:6443', extensions: null}
users:
- name: node
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: /bin/get-token
      args: null
      interactiveMode: Never
      provideClusterInfo: null
",
    );
    assert_eq!(loaded.config.cluster_url.host(), Some("api"));
    assert!(loaded.plugin.is_some());
}

#[test]
fn paths_are_relative_to_the_file() {
    let (dir, path) = written(
        "
clusters: [{name: here, cluster: {server: 'https://api', certificate-authority: ca.pem}}]
users:
- name: node
  user:
    client-certificate: pki/node.pem
    client-key: /keys/node.pem
    exec: {command: bin/get-token}
- name: other
  user: {exec: {command: get-token}}
",
    );
    let file = read(&path).unwrap();
    let here = |name: &str| dir.path().join(name).to_str().map(str::to_owned);
    let cluster = file.clusters[0].cluster.as_ref().unwrap();
    assert_eq!(cluster.certificate_authority, here("ca.pem"));
    let user = file.auth_infos[0].auth_info.as_ref().unwrap();
    assert_eq!(user.client_certificate, here("pki/node.pem"));
    assert_eq!(user.client_key.as_deref(), Some("/keys/node.pem"));
    let command = |at: usize| {
        let user = file.auth_infos[at].auth_info.as_ref().unwrap();
        user.exec.as_ref().unwrap().command.clone()
    };
    assert_eq!(command(0), here("bin/get-token"));
    assert_eq!(command(1).as_deref(), Some("get-token"));
}

#[test]
fn the_written_server_is_told_whatever_bytes_are_in_the_file() {
    let (_dir, path) = written("clusters: [{name: here, cluster: {server: 'https://api'}}]");
    assert_eq!(server_of(&path).as_deref(), Some("https://api"));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("\u{feff}{text}")).unwrap();
    assert_eq!(server_of(&path).as_deref(), Some("https://api"));
    fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    assert_eq!(server_of(&path), None);
}

#[test]
fn an_error_has_the_first_readers_words_and_no_secrets() {
    let text = format!("{HEAD}clusters: []\nusers: [{{name: node, user: {{token: [s3cret]}}}}]");
    let error = parse(Path::new("f"), &text).unwrap_err();
    let ApiError::Parse { source, .. } = error else {
        unreachable!();
    };
    let told = crate::types::causes(source.as_ref());
    assert!(!told.contains("s3cret") && !told.is_empty(), "{told}");
}
