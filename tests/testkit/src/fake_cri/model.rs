//! What the fake runtime holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_cri::v1;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tonic::Status;

use super::create::Environment;
use super::program::Behaviour;

pub(super) struct Model {
    started: Instant,
    wall_ns: i64,
    last_ns: i64,
    serial: u64,
    address: u32,
    sandboxes: BTreeMap<String, Sandbox>,
    containers: BTreeMap<String, Container>,
    images: BTreeMap<String, v1::Image>,
    /// IDs of images whose layers are missing although they are listed.
    broken: BTreeSet<String>,
    /// Images whose program is empty.
    empty: BTreeSet<String>,
    /// Images whose layers are in memory only.
    unsynced: BTreeSet<String>,
    image_directory: String,
}

struct Sandbox {
    config: v1::PodSandboxConfig,
    runtime_handler: String,
    created_at: i64,
    ready: bool,
    ip: String,
}

struct Container {
    config: v1::ContainerConfig,
    environment: Environment,
    sandbox_id: String,
    log_path: Option<PathBuf>,
    image_ref: String,
    state: v1::ContainerState,
    behaviour: Behaviour,
    created_at: i64,
    started_at: i64,
    finished_at: i64,
    exit_code: i32,
    reason: String,
    message: String,
    /// A start of it is under way.
    starting: bool,
}

type Event = v1::ContainerEventResponse;

impl Model {
    #[expect(
        clippy::disallowed_methods,
        reason = "the fake's wall clock starts at the real one and then follows tokio's"
    )]
    pub(super) fn new() -> Self {
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX));
        Self {
            started: Instant::now(),
            wall_ns: wall,
            last_ns: 0,
            serial: 0,
            address: 0,
            sandboxes: BTreeMap::new(),
            containers: BTreeMap::new(),
            images: BTreeMap::new(),
            broken: BTreeSet::new(),
            empty: BTreeSet::new(),
            unsynced: BTreeSet::new(),
            // There on every machine, and a sync of it costs nothing.
            image_directory: "/proc".to_owned(),
        }
    }

    pub(super) fn wipe(&mut self) {
        self.sandboxes.clear();
        self.containers.clear();
    }

    /// No sandbox is ready any more, what ran has ended unseen, and what `forgets` names (pod, container) is as it was
    /// before its start.
    pub(super) fn lose_power(&mut self, forgets: &dyn Fn(&str, &str) -> bool) {
        let now = self.now_ns();
        self.broken.append(&mut self.unsynced);
        for sandbox in self.sandboxes.values_mut() {
            sandbox.ready = false;
        }
        for container in self.containers.values_mut() {
            let labels = &container.config.labels;
            let label = |name: &str| labels.get(name).map_or("", String::as_str);
            let (pod, name) = (
                label("io.kubernetes.pod.name"),
                label("io.kubernetes.container.name"),
            );
            if forgets(pod, name) {
                container.state = v1::ContainerState::ContainerCreated;
                (container.started_at, container.finished_at) = (0, 0);
                container.exit_code = 0;
                container.reason.clear();
                container.message.clear();
            } else if container.state == v1::ContainerState::ContainerRunning {
                container.state = v1::ContainerState::ContainerExited;
                container.finished_at = now;
                container.exit_code = 255;
                container.reason = "Unknown".to_owned();
            }
            container.starting = false;
        }
    }

    /// Strictly rising, so that creation order shows.
    pub(super) fn now_ns(&mut self) -> i64 {
        let passed = i64::try_from(self.started.elapsed().as_nanos()).unwrap_or(i64::MAX);
        self.last_ns = (self.wall_ns + passed).max(self.last_ns + 1);
        self.last_ns
    }

    fn new_id(&mut self) -> String {
        self.serial += 1;
        digest(&format!("{}/{}", self.wall_ns, self.serial))
    }

    pub(super) fn run_sandbox(
        &mut self,
        config: v1::PodSandboxConfig,
        runtime_handler: String,
    ) -> Result<(String, Vec<Event>), Status> {
        let taken = self
            .sandboxes
            .iter()
            .find(|(_, s)| s.config.metadata == config.metadata);
        if let Some((id, _)) = taken {
            let meta = config.metadata.unwrap_or_default();
            return Err(Status::unknown(format!(
                "failed to reserve sandbox name \"{}_{}_{}_{}\": name is reserved for \"{id}\"",
                meta.name, meta.namespace, meta.uid, meta.attempt
            )));
        }
        let id = self.new_id();
        let ip = if network_mode(&config) == v1::NamespaceMode::Node {
            String::new()
        } else {
            self.address += 1;
            format!("10.250.{}.{}", self.address / 250, self.address % 250 + 2)
        };
        let created_at = self.now_ns();
        self.sandboxes.insert(
            id.clone(),
            Sandbox {
                config,
                runtime_handler,
                created_at,
                ready: true,
                ip,
            },
        );
        let events = [
            v1::ContainerEventType::ContainerCreatedEvent,
            v1::ContainerEventType::ContainerStartedEvent,
        ];
        let events = events.map(|kind| self.event(&id, &id, kind)).to_vec();
        Ok((id, events))
    }

    /// Kills what runs in the sandbox, then the sandbox; the events of it. Nothing for one that is stopped.
    pub(super) fn stop_sandbox(&mut self, id: &str, code: i32) -> Vec<Event> {
        let running: Vec<String> = self
            .containers
            .iter()
            .filter(|(_, c)| c.sandbox_id == id)
            .map(|(id, _)| id.clone())
            .collect();
        let mut events: Vec<Event> = running
            .iter()
            .filter_map(|container| self.exit(container, code, None))
            .collect();
        if let Some(sandbox) = self.sandboxes.get_mut(id)
            && sandbox.ready
        {
            sandbox.ready = false;
            events.push(self.event(id, id, v1::ContainerEventType::ContainerStoppedEvent));
        }
        events
    }

    pub(super) fn remove_sandbox(&mut self, id: &str) -> Vec<Event> {
        let mut events = self.stop_sandbox(id, 137);
        let inside: Vec<String> = self
            .containers
            .iter()
            .filter(|(_, c)| c.sandbox_id == id)
            .map(|(id, _)| id.clone())
            .collect();
        for container in inside {
            events.extend(self.remove_container(&container));
        }
        if self.sandboxes.contains_key(id) {
            events.push(self.event(id, id, v1::ContainerEventType::ContainerDeletedEvent));
            self.sandboxes.remove(id);
        }
        events
    }

    pub(super) fn sandbox_status(&self, id: &str) -> Result<v1::PodSandboxStatus, Status> {
        let sandbox = self
            .sandboxes
            .get(id)
            .ok_or_else(|| not_found("sandbox", id))?;
        let config = &sandbox.config;
        let options = config
            .linux
            .as_ref()
            .and_then(|l| l.security_context.as_ref())
            .and_then(|s| s.namespace_options.clone());
        let ip = if sandbox.ready {
            sandbox.ip.clone()
        } else {
            String::new()
        };
        Ok(v1::PodSandboxStatus {
            id: id.to_owned(),
            metadata: config.metadata.clone(),
            state: sandbox_state(sandbox.ready) as i32,
            created_at: sandbox.created_at,
            network: Some(v1::PodSandboxNetworkStatus {
                ip,
                additional_ips: Vec::new(),
            }),
            linux: Some(v1::LinuxPodSandboxStatus {
                namespaces: Some(v1::Namespace { options }),
            }),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            runtime_handler: sandbox.runtime_handler.clone(),
        })
    }

    pub(super) fn list_sandboxes(
        &self,
        filter: Option<&v1::PodSandboxFilter>,
    ) -> Vec<v1::PodSandbox> {
        let mut items: Vec<v1::PodSandbox> = self
            .sandboxes
            .iter()
            .map(|(id, s)| v1::PodSandbox {
                id: id.clone(),
                metadata: s.config.metadata.clone(),
                state: sandbox_state(s.ready) as i32,
                created_at: s.created_at,
                labels: s.config.labels.clone(),
                annotations: s.config.annotations.clone(),
                runtime_handler: s.runtime_handler.clone(),
            })
            .collect();
        if let Some(filter) = filter {
            items.retain(|s| {
                (filter.id.is_empty() || s.id.starts_with(&filter.id))
                    && filter.state.as_ref().is_none_or(|f| f.state == s.state)
                    && selects(&filter.label_selector, &s.labels)
            });
        }
        items.sort_by_key(|s| s.created_at);
        items
    }

    pub(super) fn create_container(
        &mut self,
        sandbox_id: String,
        config: v1::ContainerConfig,
        environment: Environment,
    ) -> Result<(String, Event), Status> {
        let sandbox = self
            .sandboxes
            .get(&sandbox_id)
            .ok_or_else(|| not_found("sandbox", &sandbox_id))?;
        if !sandbox.ready {
            return Err(Status::unknown(format!(
                "failed to get sandbox container task: no running task found: task {sandbox_id} not found"
            )));
        }
        let image = config.image.as_ref().map_or("", |i| &i.image);
        let image_ref = self.image(image).map(|i| i.id.clone()).ok_or_else(|| {
            Status::not_found(format!("failed to resolve image \"{image}\": not found"))
        })?;
        if self.broken.contains(&image_ref) {
            return Err(Status::unknown(
                "failed to create containerd container: failed to stat parent: stat /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/7/fs: no such file or directory",
            ));
        }
        let taken = self
            .containers
            .iter()
            .find(|(_, c)| c.sandbox_id == sandbox_id && c.config.metadata == config.metadata);
        if let Some((id, _)) = taken {
            let meta = config.metadata.unwrap_or_default();
            return Err(Status::unknown(format!(
                "failed to reserve container name \"{}_{}\": name is reserved for \"{id}\"",
                meta.name, meta.attempt
            )));
        }
        let log_directory = &sandbox.config.log_directory;
        let log_path = (!log_directory.is_empty() && !config.log_path.is_empty())
            .then(|| Path::new(log_directory).join(&config.log_path));
        let id = self.new_id();
        let created_at = self.now_ns();
        self.containers.insert(
            id.clone(),
            Container {
                config,
                environment,
                sandbox_id: sandbox_id.clone(),
                log_path,
                image_ref,
                state: v1::ContainerState::ContainerCreated,
                behaviour: Behaviour::RunForever,
                created_at,
                started_at: 0,
                finished_at: 0,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                starting: false,
            },
        );
        let event = self.event(
            &id,
            &sandbox_id,
            v1::ContainerEventType::ContainerCreatedEvent,
        );
        Ok((id, event))
    }

    /// A start of a created container that takes its time begins; `false` when it cannot.
    pub(super) fn begin_start(&mut self, id: &str) -> bool {
        let created = v1::ContainerState::ContainerCreated;
        let container = self.containers.get_mut(id);
        let container = container.filter(|c| c.state == created && !c.starting);
        container.map(|c| c.starting = true).is_some()
    }

    /// Such a start ends: in a running container, or undone.
    pub(super) fn end_start(&mut self, id: &str, undone: bool) -> Result<Event, Status> {
        let now = self.now_ns();
        let container = self
            .containers
            .get_mut(id)
            .ok_or_else(|| not_found("container", id))?;
        container.starting = false;
        if undone {
            let why = "failed to create containerd task: failed to create shim task: context canceled: unknown";
            container.state = v1::ContainerState::ContainerExited;
            container.finished_at = now;
            container.exit_code = 128;
            container.reason = "StartError".to_owned();
            container.message = why.to_owned();
            return Err(Status::unknown(why));
        }
        Ok(self.start_container(id, Behaviour::RunForever)?.0)
    }

    /// Starts a created container; the event and, for one that ends by itself, code and run time.
    pub(super) fn start_container(
        &mut self,
        id: &str,
        behaviour: Behaviour,
    ) -> Result<(Event, Option<(i32, Duration)>), Status> {
        let now = self.now_ns();
        let container = self
            .containers
            .get_mut(id)
            .ok_or_else(|| not_found("container", id))?;
        if container.state != v1::ContainerState::ContainerCreated {
            return Err(Status::unknown(format!(
                "container \"{id}\" is in {} state",
                container.state.as_str_name()
            )));
        }
        if container.starting {
            return Err(Status::unknown(format!(
                "failed to set starting state for container \"{id}\": container is already in starting state"
            )));
        }
        if let Behaviour::FailToStart(why) = &behaviour {
            container.state = v1::ContainerState::ContainerExited;
            container.finished_at = now;
            container.exit_code = 128;
            container.reason = "StartError".to_owned();
            return Err(Status::unknown(format!(
                "failed to create containerd task: failed to create shim task: OCI runtime create failed: {why}"
            )));
        }
        let behaviour = if self.empty.contains(&container.image_ref) {
            append_log(container, "stderr", "exec /app: exec format error");
            Behaviour::Exit {
                code: 255,
                after: Duration::ZERO,
            }
        } else {
            write_log(container);
            behaviour
        };
        container.state = v1::ContainerState::ContainerRunning;
        container.started_at = now;
        let end = match &behaviour {
            Behaviour::Exit { code, after } => Some((*code, *after)),
            _ => None,
        };
        container.behaviour = behaviour;
        let sandbox_id = container.sandbox_id.clone();
        let event = self.event(
            id,
            &sandbox_id,
            v1::ContainerEventType::ContainerStartedEvent,
        );
        Ok((event, end))
    }

    /// Ends a running container.
    pub(super) fn exit(&mut self, id: &str, code: i32, reason: Option<&str>) -> Option<Event> {
        let now = self.now_ns();
        let container = self.containers.get_mut(id)?;
        if container.state != v1::ContainerState::ContainerRunning {
            return None;
        }
        container.state = v1::ContainerState::ContainerExited;
        container.finished_at = now;
        container.exit_code = code;
        let by_code = if code == 0 { "Completed" } else { "Error" };
        container.reason = reason.unwrap_or(by_code).to_owned();
        let sandbox_id = container.sandbox_id.clone();
        Some(self.event(
            id,
            &sandbox_id,
            v1::ContainerEventType::ContainerStoppedEvent,
        ))
    }

    /// What a running container does.
    pub(super) fn running(&self, id: &str) -> Option<Behaviour> {
        self.containers
            .get(id)
            .filter(|c| c.state == v1::ContainerState::ContainerRunning)
            .map(|c| c.behaviour.clone())
    }

    pub(super) fn remove_container(&mut self, id: &str) -> Option<Event> {
        let sandbox_id = self.containers.get(id)?.sandbox_id.clone();
        let event = self.event(
            id,
            &sandbox_id,
            v1::ContainerEventType::ContainerDeletedEvent,
        );
        self.containers.remove(id);
        Some(event)
    }

    pub(super) fn container_status(&self, id: &str) -> Result<v1::ContainerStatus, Status> {
        let container = self
            .containers
            .get(id)
            .ok_or_else(|| not_found("container", id))?;
        let config = &container.config;
        Ok(v1::ContainerStatus {
            id: id.to_owned(),
            metadata: config.metadata.clone(),
            state: container.state as i32,
            created_at: container.created_at,
            started_at: container.started_at,
            finished_at: container.finished_at,
            exit_code: container.exit_code,
            image: config.image.clone(),
            image_ref: container.image_ref.clone(),
            reason: container.reason.clone(),
            message: container.message.clone(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path: container
                .log_path
                .as_ref()
                .map_or_else(String::new, |p| p.display().to_string()),
            image_id: container.image_ref.clone(),
            ..Default::default()
        })
    }

    pub(super) fn list_containers(
        &self,
        filter: Option<&v1::ContainerFilter>,
    ) -> Vec<v1::Container> {
        let mut items: Vec<v1::Container> = self
            .containers
            .iter()
            .map(|(id, c)| v1::Container {
                id: id.clone(),
                pod_sandbox_id: c.sandbox_id.clone(),
                metadata: c.config.metadata.clone(),
                image: c.config.image.clone(),
                image_ref: c.image_ref.clone(),
                state: c.state as i32,
                created_at: c.created_at,
                labels: c.config.labels.clone(),
                annotations: c.config.annotations.clone(),
                image_id: c.image_ref.clone(),
            })
            .collect();
        if let Some(filter) = filter {
            items.retain(|c| {
                (filter.id.is_empty() || c.id.starts_with(&filter.id))
                    && (filter.pod_sandbox_id.is_empty()
                        || c.pod_sandbox_id == filter.pod_sandbox_id)
                    && filter.state.as_ref().is_none_or(|f| f.state == c.state)
                    && selects(&filter.label_selector, &c.labels)
            });
        }
        items.sort_by_key(|c| c.created_at);
        items
    }

    pub(super) fn config(&self, id: &str) -> Option<v1::ContainerConfig> {
        self.containers.get(id).map(|c| c.config.clone())
    }

    pub(super) fn environment(&self, id: &str) -> Option<Environment> {
        self.containers.get(id).map(|c| c.environment.clone())
    }

    pub(super) fn forget_annotation(&mut self, key: &str) {
        for sandbox in self.sandboxes.values_mut() {
            sandbox.config.annotations.remove(key);
        }
    }

    pub(super) fn sandbox_config(&self, id: &str) -> Option<v1::PodSandboxConfig> {
        self.sandboxes.get(id).map(|s| s.config.clone())
    }

    /// Opens the log anew; an error when the container does not run.
    pub(super) fn reopen_log(&self, id: &str) -> Result<(), Status> {
        let container = self
            .containers
            .get(id)
            .ok_or_else(|| not_found("container", id))?;
        if container.state != v1::ContainerState::ContainerRunning {
            return Err(Status::unknown("container is not running"));
        }
        write_log(container);
        Ok(())
    }

    pub(super) fn add_image(&mut self, name: &str) -> String {
        let id = format!("sha256:{}", digest(name));
        self.images.entry(name.to_owned()).or_insert(v1::Image {
            id: id.clone(),
            repo_tags: vec![name.to_owned()],
            size: 1_000_000,
            ..Default::default()
        });
        id
    }

    /// Pulls an image. What is unpacked is in memory until [`Self::sync_images`].
    pub(super) fn pull_image(&mut self, name: &str) -> String {
        let id = format!("sha256:{}", digest(name));
        if self.image(&id).is_none() && !self.broken.contains(&id) {
            self.unsynced.insert(id);
        }
        self.add_image(name)
    }

    pub(super) fn sync_images(&mut self) {
        self.unsynced.clear();
    }

    pub(super) fn image(&self, name: &str) -> Option<&v1::Image> {
        self.images
            .get(name)
            .or_else(|| self.images.values().find(|i| i.id == name))
    }

    pub(super) fn images(&self) -> Vec<v1::Image> {
        self.images.values().cloned().collect()
    }

    pub(super) fn remove_image(&mut self, name: &str) {
        let id = self.image(name).map(|image| image.id.clone());
        self.images
            .retain(|tag, image| tag != name && image.id != name);
        // As containerd's collector: a container keeps the layers of its image, and the next pull believes them.
        if let Some(id) = id
            && self.containers.values().all(|c| c.image_ref != id)
        {
            self.broken.remove(&id);
            self.empty.remove(&id);
            self.unsynced.remove(&id);
        }
    }

    pub(super) fn empty_program(&mut self, name: &str) {
        if let Some(id) = self.image(name).map(|image| image.id.clone()) {
            self.empty.insert(id);
        }
    }

    pub(super) fn break_image(&mut self, name: &str) {
        if let Some(id) = self.image(name).map(|image| image.id.clone()) {
            self.broken.insert(id);
        }
    }

    pub(super) fn is_broken(&self, name: &str) -> bool {
        self.image(name)
            .is_some_and(|image| self.broken.contains(&image.id))
    }

    pub(super) fn keep_images_in(&mut self, directory: String) {
        self.image_directory = directory;
    }

    pub(super) fn image_directory(&self) -> String {
        self.image_directory.clone()
    }

    fn event(&mut self, id: &str, sandbox_id: &str, kind: v1::ContainerEventType) -> Event {
        let created_at = self.now_ns();
        let containers_statuses = self
            .containers
            .iter()
            .filter(|(_, c)| c.sandbox_id == sandbox_id)
            .filter_map(|(id, _)| self.container_status(id).ok())
            .collect();
        Event {
            container_id: id.to_owned(),
            container_event_type: kind as i32,
            created_at,
            pod_sandbox_status: self.sandbox_status(sandbox_id).ok(),
            containers_statuses,
        }
    }
}

fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn network_mode(config: &v1::PodSandboxConfig) -> v1::NamespaceMode {
    config
        .linux
        .as_ref()
        .and_then(|l| l.security_context.as_ref())
        .and_then(|s| s.namespace_options.as_ref())
        .map_or(v1::NamespaceMode::Pod, |o| o.network())
}

fn sandbox_state(ready: bool) -> v1::PodSandboxState {
    if ready {
        v1::PodSandboxState::SandboxReady
    } else {
        v1::PodSandboxState::SandboxNotready
    }
}

fn selects(selector: &HashMap<String, String>, labels: &HashMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

fn not_found(what: &str, id: &str) -> Status {
    Status::not_found(format!(
        "an error occurred when try to find {what} \"{id}\": not found"
    ))
}

/// Appends what the program prints to its log, where the log directory exists.
fn write_log(container: &Container) {
    let config = &container.config;
    let argv: Vec<&str> = config
        .command
        .iter()
        .chain(&config.args)
        .map(String::as_str)
        .collect();
    append_log(container, "stdout", &super::program::output(&argv));
}

/// Appends these lines to the log, where the log directory exists.
fn append_log(container: &Container, stream: &str, lines: &str) {
    use std::io::Write as _;
    let Some(path) = &container.log_path else {
        return;
    };
    let Ok(mut file) = std::fs::File::options()
        .create(true)
        .append(true)
        .open(path)
    else {
        return;
    };
    for line in lines.lines() {
        // A log nobody can write is nobody's test.
        drop(writeln!(
            file,
            "2000-01-01T00:00:00.000000000Z {stream} F {line}"
        ));
    }
}
