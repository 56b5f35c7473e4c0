//! Content of an archive of images: tar as written by `docker save`, `ctr images export` or `podman save`, plain or
//! compressed with gzip or zstd.
//!
//! The whole archive is read, so one that is cut off is found before the runtime gets it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;

use crate::core::node_status::architecture;

/// Most that is read of one of the lists in an archive.
const MAX_LIST: u64 = 8 << 20;
/// The name that containerd gives an image in an index.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// The name that everybody else does; often a tag alone.
const OCI_NAME: &str = "org.opencontainers.image.ref.name";

/// Longest configuration of an image that is looked at, and how many bytes of files of that kind are kept for it.
const MAX_CONFIG: u64 = 256 << 10;
const MAX_CONFIGS: usize = 16 << 20;

/// An archive that cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It cannot be read, or is cut off.
    #[error("it cannot be read to its end, copy it again: {0}")]
    Damaged(#[source] io::Error),
    /// One of the compressions that runtimes do not know.
    #[error("its compression is {0}, which is not supported: use none, gzip or zstd")]
    Compression(&'static str),
    /// A list in it makes no sense.
    #[error("{file} in it is damaged: {source}")]
    List {
        /// `manifest.json` or `index.json`.
        file: &'static str,
        /// Cause.
        #[source]
        source: serde_json::Error,
    },
    /// It has no list of images, or none of them has a name.
    #[error(
        "it names no image: save images by their names (docker save NAME:TAG, ctr images export)"
    )]
    NoImages,
    /// An image in it is for other machines.
    #[error(
        "{image} in it is for {found}, and this machine is {wanted}: save it for this machine (docker pull --platform linux/{wanted}, then docker save)"
    )]
    Architecture {
        /// Its name.
        image: String,
        /// The architecture in its configuration.
        found: String,
        /// The architecture of this machine, in Go's words as well.
        wanted: &'static str,
    },
}

/// An image in `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    #[serde(default)]
    config: String,
    repo_tags: Option<Vec<String>>,
}

/// The configuration of an image.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    architecture: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
struct Descriptor {
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

/// The names of the images in an archive, sorted, as they are written in it. Blocks until all of it is read.
///
/// # Errors
/// See [`ArchiveError`].
pub fn images_in(path: &Path) -> Result<Vec<String>, ArchiveError> {
    let mut file = File::open(path).map_err(ArchiveError::Damaged)?;
    let mut magic = [0; 6];
    let known = read_up_to(&mut file, &mut magic).map_err(ArchiveError::Damaged)?;
    file.seek(SeekFrom::Start(0))
        .map_err(ArchiveError::Damaged)?;
    let file = BufReader::with_capacity(1 << 20, file);
    match &magic[..known] {
        [0x1f, 0x8b, ..] => read(flate2::bufread::MultiGzDecoder::new(file)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            read(zstd::stream::read::Decoder::with_buffer(file).map_err(ArchiveError::Damaged)?)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Err(ArchiveError::Compression("xz")),
        [b'B', b'Z', b'h', ..] => Err(ArchiveError::Compression("bzip2")),
        [0x04, 0x22, 0x4d, 0x18, ..] => Err(ArchiveError::Compression("lz4")),
        _ => read(file),
    }
}

fn read_up_to(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..])? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(filled)
}

fn read(from: impl Read) -> Result<Vec<String>, ArchiveError> {
    let mut archive = tar::Archive::new(from);
    let (mut saved, mut index) = (None, None);
    let mut configs = Configs::default();
    for entry in archive.entries().map_err(ArchiveError::Damaged)? {
        let mut entry = entry.map_err(ArchiveError::Damaged)?;
        let path = entry.path().map_err(ArchiveError::Damaged)?.into_owned();
        let path = path.strip_prefix("./").unwrap_or(&path);
        let into = match path.to_str() {
            Some("manifest.json") => &mut saved,
            Some("index.json") => &mut index,
            Some(name) if configs.wants(entry.size()) => {
                let mut text = Vec::new();
                entry
                    .read_to_end(&mut text)
                    .map_err(ArchiveError::Damaged)?;
                configs.add(name, text);
                continue;
            }
            _ => {
                // A file that is cut off is not an error before it is read.
                io::copy(&mut entry, &mut io::sink()).map_err(ArchiveError::Damaged)?;
                continue;
            }
        };
        let mut text = Vec::new();
        entry
            .take(MAX_LIST)
            .read_to_end(&mut text)
            .map_err(ArchiveError::Damaged)?;
        *into = Some(text);
    }
    let mut names = Vec::new();
    if let Some(text) = saved {
        let saved: Vec<Saved> = parse("manifest.json", &text)?;
        configs.check(&saved)?;
        names.extend(saved.into_iter().flat_map(|s| s.repo_tags).flatten());
    }
    if names.is_empty()
        && let Some(text) = index
    {
        let index: Index = parse("index.json", &text)?;
        let annotated = index.manifests.into_iter().flatten();
        names.extend(
            annotated
                .filter_map(|d| d.annotations)
                .filter_map(|mut all| {
                    let name = all.remove(CONTAINERD_NAME);
                    // A tag alone names no image.
                    name.or_else(|| {
                        all.remove(OCI_NAME)
                            .filter(|name| name.contains(['/', ':']))
                    })
                }),
        );
    }
    // They become arguments of the runtime's tool.
    names.retain(|name| super::normalize(name).is_ok());
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(ArchiveError::NoImages);
    }
    Ok(names)
}

/// Small files of an archive: one of them may be the configuration of an image, which the list that says so may follow.
#[derive(Default)]
struct Configs {
    files: HashMap<String, Vec<u8>>,
    bytes: usize,
}

impl Configs {
    fn wants(&self, size: u64) -> bool {
        size <= MAX_CONFIG && self.bytes < MAX_CONFIGS
    }

    fn add(&mut self, name: &str, text: Vec<u8>) {
        if text.starts_with(b"{") {
            self.bytes += text.len();
            self.files.insert(name.to_owned(), text);
        }
    }

    /// Refuses an image whose every configuration under its name is for other machines. One that does not say what it is for
    /// is left to the runtime.
    fn check(&self, saved: &[Saved]) -> Result<(), ArchiveError> {
        let wanted = architecture();
        let runs = run_by(wanted);
        if runs.is_empty() {
            return Ok(());
        }
        let mut found: BTreeMap<&str, Vec<Option<String>>> = BTreeMap::new();
        for image in saved {
            let text = self.files.get(&image.config);
            let config = text.and_then(|text| serde_json::from_slice::<Config>(text).ok());
            let says = config.map(|config| config.architecture);
            let says = says.filter(|architecture| !architecture.is_empty());
            for name in image.repo_tags.iter().flatten() {
                found.entry(name).or_default().push(says.clone());
            }
        }
        for (image, says) in found {
            let is_other = |says: &Option<String>| {
                says.as_ref()
                    .is_some_and(|says| !runs.contains(&says.as_str()))
            };
            if says.iter().all(is_other)
                && let Some(Some(found)) = says.into_iter().next()
            {
                return Err(ArchiveError::Architecture {
                    image: image.to_owned(),
                    found,
                    wanted,
                });
            }
        }
        Ok(())
    }
}

/// The architectures whose images containerd runs on a machine of this one; none where that is not known.
fn run_by(architecture: &str) -> &'static [&'static str] {
    match architecture {
        "amd64" => &["amd64", "386"],
        "arm64" => &["arm64", "arm"],
        "arm" => &["arm"],
        "riscv64" => &["riscv64"],
        "s390x" => &["s390x"],
        "ppc64le" => &["ppc64le"],
        _ => &[],
    }
}

fn parse<'a, T: Deserialize<'a>>(file: &'static str, text: &'a [u8]) -> Result<T, ArchiveError> {
    serde_json::from_slice(text).map_err(|source| ArchiveError::List { file, source })
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write as _;

    use super::*;

    /// An archive with these files.
    pub(crate) fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            builder.append_data(&mut header, name, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    /// An archive as `docker save` writes it.
    pub(crate) fn saved(names: &[&str]) -> Vec<u8> {
        let manifest = serde_json::json!([{"Config": "c.json", "RepoTags": names, "Layers": []}]);
        let manifest = manifest.to_string();
        tar_of(&[
            ("layer.tar", &[7; 20_000]),
            ("manifest.json", manifest.as_bytes()),
        ])
    }

    /// An archive as `docker save` writes it, of images for these architectures.
    pub(crate) fn saved_for(images: &[(&str, &str)]) -> Vec<u8> {
        let list = images.iter().enumerate().map(
            |(n, (name, _))| serde_json::json!({"Config": format!("{n}.json"), "RepoTags": [name]}),
        );
        let manifest = serde_json::Value::Array(list.collect()).to_string();
        let config = |(n, (_, architecture)): (usize, &(&str, &str))| {
            let config = serde_json::json!({"architecture": architecture, "os": "linux"});
            (format!("{n}.json"), config.to_string())
        };
        let configs: Vec<(String, String)> = images.iter().enumerate().map(config).collect();
        let mut files: Vec<(&str, &[u8])> = configs
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_bytes()))
            .collect();
        files.push(("manifest.json", manifest.as_bytes()));
        tar_of(&files)
    }

    #[test]
    fn an_image_for_other_machines_is_refused_by_name() {
        let own = architecture();
        for (what, images, want) in [
            ("own", vec![("a:1", own)], None),
            (
                "another",
                vec![("a:1", own), ("b:1", "mips64le")],
                Some("b:1"),
            ),
            (
                "one name, both",
                vec![("a:1", own), ("a:1", "mips64le")],
                None,
            ),
            ("nothing said", vec![("a:1", "")], None),
        ] {
            let refused = images_of(&saved_for(&images)).err();
            let refused = refused.map(|error| error.to_string());
            let want = want
                .map(|image| format!("{image} in it is for mips64le, and this machine is {own}"));
            match (&refused, &want) {
                (None, None) => {}
                (Some(refused), Some(want)) => {
                    assert!(refused.starts_with(want.as_str()), "{what}: {refused}");
                }
                _ => panic!("{what}: {refused:?}"),
            }
        }
    }

    fn images_of(bytes: &[u8]) -> Result<Vec<String>, ArchiveError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        images_in(file.path())
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn names_are_found_in_every_kind_of_archive() {
        let docker = saved(&["b:1", "r.example/a:2"]);
        let index = serde_json::json!({"schemaVersion": 2, "manifests": [
            {"annotations": {CONTAINERD_NAME: "docker.io/library/b:1", OCI_NAME: "1"}},
            {"annotations": {OCI_NAME: "r.example/a:2"}},
            {"annotations": {OCI_NAME: "latest"}},
            {},
        ]});
        let oci = tar_of(&[("./index.json", index.to_string().as_bytes())]);
        let of_docker = ["b:1", "r.example/a:2"];
        let of_oci = ["docker.io/library/b:1", "r.example/a:2"];
        for (what, bytes, want) in [
            ("docker", docker.clone(), of_docker),
            ("gzip", gzip(&docker), of_docker),
            ("zstd", zstd::encode_all(&docker[..], 1).unwrap(), of_docker),
            ("oci", oci, of_oci),
        ] {
            assert_eq!(images_of(&bytes).unwrap(), want, "{what}");
        }
    }

    #[test]
    fn an_archive_that_cannot_be_imported_says_why() {
        let docker = saved(&["b:1"]);
        let cut = &docker[..docker.len() / 2];
        let gzipped = gzip(&docker);
        for (what, bytes, want) in [
            ("cut off", cut.to_vec(), "cannot be read to its end"),
            (
                "cut off within gzip",
                gzipped[..gzipped.len() / 2].to_vec(),
                "cannot be read to its end",
            ),
            ("no tar", vec![b'x'; 4096], "cannot be read to its end"),
            (
                "xz",
                b"\xfd7zXZ\0rest".to_vec(),
                "xz, which is not supported",
            ),
            (
                "bzip2",
                b"BZh9rest".to_vec(),
                "bzip2, which is not supported",
            ),
            ("no list", tar_of(&[("a", b"b")]), "names no image"),
            ("empty", Vec::new(), "names no image"),
            (
                "no names",
                tar_of(&[("manifest.json", b"[{\"RepoTags\": null}]")]),
                "names no image",
            ),
            (
                "an option for a name",
                saved(&["--force"]),
                "names no image",
            ),
            (
                "broken list",
                tar_of(&[("manifest.json", b"[{")]),
                "manifest.json in it is damaged",
            ),
        ] {
            let error = images_of(&bytes).unwrap_err().to_string();
            assert!(error.contains(want), "{what}: {error}");
        }
    }
}
