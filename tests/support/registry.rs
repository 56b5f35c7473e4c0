//! Debian's `docker-registry` on loopback, with images whose content nobody had before, and a proxy between it and the
//! runtime that is slow, breaks off, or counts bytes.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testkit::ports::free_port;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// `bob` with password `hunter2`, as `htpasswd -B` writes it.
const HTPASSWD: &str = "bob:$2y$05$WWgRVED/LLTOZtkWUUWvSuGUdwSAfsFFCIlEoVX0IB8kK6if2wpFe\n";
/// Bytes of a layer where its size does not matter.
pub const LAYER: usize = 1 << 20;

/// A `docker-registry`, killed when dropped.
pub struct Registry {
    child: Child,
    pub port: u16,
    dir: tempfile::TempDir,
}

impl Registry {
    pub fn start(with_password: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut config = json!({
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": dir.path().join("data")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        if with_password {
            let path = dir.path().join("htpasswd");
            fs::write(&path, HTPASSWD).unwrap();
            config["auth"] = json!({"htpasswd": {"realm": "test", "path": path}});
        }
        // JSON is YAML.
        let path = dir.path().join("config.yml");
        fs::write(&path, config.to_string()).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("THERE IS NO docker-registry TO TEST AGAINST; hack/deps.sh test installs it");
        let registry = Self { child, port, dir };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "docker-registry does not listen: {}",
                fs::read_to_string(registry.dir.path().join("log")).unwrap_or_default()
            );
            std::thread::yield_now();
        }
        registry
    }

    fn v2(&self) -> PathBuf {
        self.dir.path().join("data/docker/registry/v2")
    }

    pub fn blob_path(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").unwrap();
        let dir = self.v2().join("blobs/sha256").join(&hex[..2]).join(hex);
        dir.join("data")
    }

    fn blob(&self, repository: &str, content: &[u8]) -> String {
        let digest = digest_of(content);
        write(&self.blob_path(&digest), content);
        let hex = digest.strip_prefix("sha256:").unwrap();
        let layers = self.v2().join("repositories").join(repository);
        let link = layers.join("_layers/sha256").join(hex).join("link");
        write(&link, digest.as_bytes());
        digest
    }

    pub fn tag(&self, repository: &str, tag: &str, manifest: &[u8]) -> String {
        let digest = self.blob(repository, manifest);
        let hex = digest.strip_prefix("sha256:").unwrap();
        let manifests = self.v2().join("repositories").join(repository);
        let manifests = manifests.join("_manifests");
        for link in [
            format!("revisions/sha256/{hex}/link"),
            format!("tags/{tag}/current/link"),
            format!("tags/{tag}/index/sha256/{hex}/link"),
        ] {
            write(&manifests.join(link), digest.as_bytes());
        }
        digest
    }

    /// An image with content of its own.
    pub fn push(&self, repository: &str, tag: &str) -> Pushed {
        self.push_of(repository, tag, LAYER)
    }

    /// An image with a layer of about that many bytes.
    pub fn push_of(&self, repository: &str, tag: &str, size: usize) -> Pushed {
        self.push_layers(repository, tag, &[size])
    }

    /// An image with layers of about so many bytes, the lowest first.
    pub fn push_layers(&self, repository: &str, tag: &str, sizes: &[usize]) -> Pushed {
        let layers: Vec<(String, usize)> = sizes
            .iter()
            .map(|size| {
                let layer = layer(*size);
                (self.blob(repository, &layer), layer.len())
            })
            .collect();
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let digests: Vec<&String> = layers.iter().map(|(digest, _)| digest).collect();
        let config = json!({
            "architecture": arch, "os": "linux", "config": {"Cmd": ["/content"]},
            "rootfs": {"type": "layers", "diff_ids": digests},
        })
        .to_string();
        let config_digest = self.blob(repository, config.as_bytes());
        let kind = "application/vnd.oci.image.";
        let of_manifest: Vec<_> = layers
            .iter()
            .map(|(digest, size)| {
                json!({
                    "mediaType": format!("{kind}layer.v1.tar"),
                    "digest": digest, "size": size,
                })
            })
            .collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": format!("{kind}manifest.v1+json"),
            "config": {
                "mediaType": format!("{kind}config.v1+json"),
                "digest": config_digest, "size": config.len(),
            },
            "layers": of_manifest,
        })
        .to_string();
        Pushed {
            manifest: self.tag(repository, tag, manifest.as_bytes()),
            layer: layers.last().unwrap().0.clone(),
            id: config_digest,
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub struct Pushed {
    pub manifest: String,
    /// Digest of the last layer.
    pub layer: String,
    pub id: String,
}

fn write(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

pub fn digest_of(content: &[u8]) -> String {
    let hash = Sha256::digest(content);
    let hex: String = hash.iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// A tar archive with one file of that many bytes that nobody had before.
fn layer(size: usize) -> Vec<u8> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let mut seed = format!("{}-{serial}", std::process::id()).into_bytes();
    let mut content = Vec::with_capacity(size);
    while content.len() < size {
        seed = Sha256::digest(&seed).to_vec();
        content.extend_from_slice(&seed);
    }
    let mut header = [0_u8; 512];
    let mut field = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    field(0, "content");
    field(100, "0000644");
    field(108, "0000000");
    field(116, "0000000");
    field(124, &format!("{:011o}", content.len()));
    field(136, "00000000000");
    field(148, "        ");
    field(156, "0");
    field(257, "ustar");
    field(263, "00");
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut tar = header.to_vec();
    tar.extend_from_slice(&content);
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    tar
}

#[derive(Clone, Copy)]
pub enum Weather {
    Fine,
    /// So many bytes per second and connection.
    Slow(usize),
    /// So many bytes in all, then every connection breaks.
    Cut(usize),
    /// Connections break at once.
    Away,
    /// Connections stay open without an answer.
    Mute,
}

/// A TCP proxy before a registry.
pub struct Proxy {
    pub port: u16,
    weather: Arc<Mutex<Weather>>,
    sent: Arc<AtomicU64>,
}

impl Proxy {
    pub fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            weather: Arc::new(Mutex::new(Weather::Fine)),
            sent: Arc::default(),
        };
        let (weather, sent) = (Arc::clone(&proxy.weather), Arc::clone(&proxy.sent));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (weather, sent) = (Arc::clone(&weather), Arc::clone(&sent));
                std::thread::spawn(move || relay(client, upstream, &weather, &sent));
            }
        });
        proxy
    }

    pub fn set(&self, weather: Weather) {
        self.sent.store(0, Ordering::SeqCst);
        *self.weather.lock().unwrap() = weather;
    }

    /// Bytes that the registry has sent since the last [`Self::set`].
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }
}

fn relay(mut client: TcpStream, upstream: u16, weather: &Mutex<Weather>, sent: &AtomicU64) {
    let now = *weather.lock().unwrap();
    match now {
        Weather::Away => return,
        Weather::Mute => {
            io::copy(&mut client, &mut io::sink()).ok();
            return;
        }
        Weather::Fine | Weather::Slow(_) | Weather::Cut(_) => {}
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)) else {
        return;
    };
    let (mut from_client, mut to_server) =
        (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || {
        io::copy(&mut from_client, &mut to_server).ok();
        to_server.shutdown(Shutdown::Write).ok();
    });
    let (mut server, mut client) = (server, client);
    let mut buffer = [0_u8; 8192];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        let so_far = sent.fetch_add(count as u64, Ordering::SeqCst);
        let weather = *weather.lock().unwrap();
        match weather {
            Weather::Fine => {}
            Weather::Slow(rate) => {
                std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
            }
            Weather::Cut(limit) if so_far >= limit as u64 => break,
            Weather::Cut(_) => {}
            // Connections of better times do not outlive them.
            Weather::Away | Weather::Mute => break,
        }
        if client.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    client.shutdown(Shutdown::Both).ok();
    server.shutdown(Shutdown::Both).ok();
}
