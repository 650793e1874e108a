{{- /* The configuration file of an agent (TOML): keys first, tables behind them. */}}
{{- define "kvscope.agentConfig" -}}
{{- with .Values.agent.config }}
{{- . | trim }}
{{ end }}
data = "/var/lib/kvscope"
{{- with .Values.publicUrl }}
public_url = {{ . | quote }}
{{- end }}
{{- if eq .Values.agent.kind "Sidecar" }}
events = {{ .Values.agent.sidecar.events | toJson }}
{{- with .Values.agent.sidecar.metrics }}
metrics = {{ . | toJson }}
{{- end }}
{{- else }}
events = []
{{- end }}
{{- if .Values.bus.enabled }}
{{ include "kvscope.busConfig" (dict "root" . "role" "agent") }}
{{- if eq .Values.agent.kind "StatefulSet" }}
nats_share = true
{{- end }}
{{- end }}
{{- if ne .Values.agent.kind "Sidecar" }}
{{- range (include "kvscope.engineNamespaces" . | fromJson).names }}

[[kubernetes]]
selector = {{ $.Values.agent.selector | quote }}
namespace = {{ . | quote }}
port = {{ $.Values.agent.port }}
{{- if eq $.Values.agent.kind "DaemonSet" }}
own_node = true
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.agent.tables }}

{{ . | trim }}
{{- end }}
{{- end }}

{{- /* The agent as a container: of the chart's own pods, and for charts that add it to theirs as a sidecar. */}}
{{- define "kvscope.agentContainer" -}}
name: kvscope
image: {{ include "kvscope.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [monitor, agent]
args:
  - --config=/etc/kvscope/agent/agent.toml
  - --host=0.0.0.0
  - --port=8765
  {{- if and .Values.bus.enabled (eq .Values.agent.kind "DaemonSet") }}
  - --nats-agent=$(KVSCOPE_NODE) # the next pod of the node goes on under this name
  {{- end }}
env:
  {{- include "kvscope.tokenVariable" . | nindent 2 }}
  - name: KVSCOPE_NODE
    valueFrom:
      fieldRef: {fieldPath: spec.nodeName}
ports:
  - {name: kvscope, containerPort: 8765}
{{ include "kvscope.probes" "kvscope" }}
resources:
  {{- toYaml .Values.agent.resources | nindent 2 }}
securityContext:
  {{- include "kvscope.confined" . | nindent 2 }}
volumeMounts:
  - {name: kvscope-config, mountPath: /etc/kvscope/agent, readOnly: true}
  - {name: kvscope-data, mountPath: /var/lib/kvscope}
  - {name: kvscope-scratch, mountPath: /tmp}
  {{- with include "kvscope.busMounts" (dict "root" . "role" "agent") | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* The volumes of that container, without the data of a StatefulSet. */}}
{{- define "kvscope.agentVolumes" -}}
- name: kvscope-config
  configMap: {name: {{ include "kvscope.fullname" . }}-agent}
- name: kvscope-scratch
  emptyDir: {sizeLimit: 2Gi} # of the disk that SQL of hubs may take
{{- if ne .Values.agent.kind "StatefulSet" }}
- name: kvscope-data
  emptyDir: {sizeLimit: {{ .Values.agent.data.size | quote }}}
{{- end }}
{{- include "kvscope.busVolumes" (dict "root" . "role" "agent") }}
{{- end }}
